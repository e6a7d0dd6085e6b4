"""List of all targets by name."""

from tests.fuzz.adapter_targets import ADAPTER_TARGETS
from tests.fuzz.image_targets import IMAGE_TARGETS
from tests.fuzz.network_targets import NETWORK_TARGETS
from tests.fuzz.stored_targets import STORED_TARGETS

_ALL = (*ADAPTER_TARGETS, *IMAGE_TARGETS, *NETWORK_TARGETS, *STORED_TARGETS)
TARGETS = {target.name: target for target in _ALL}
