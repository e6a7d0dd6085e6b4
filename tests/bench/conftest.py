"""Makes `bench`, which is not installed, importable."""

import sys
from pathlib import Path

# Behind everything else: the checkout's root must not hide an installed package.
sys.path.append(str(Path(__file__).resolve().parents[2]))
