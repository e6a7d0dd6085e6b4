"""Images with odd and hostile layers that a container engine still unpacks.

Layers are tars of every dialect: written header by header where no tool would write them, and by
GNU tar, bsdtar and Python where the tools' own output is tested. `ZOO` maps a name to a function
that makes the layers, each an uncompressed tar and its compression.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from testbed.images.building import LayoutBuilder
from testbed.images.zoo_layers import (
    Layers,
    attributes,
    dialects,
    global_headers,
    names,
    tools,
)
from testbed.images.zoo_stacks import (
    changes,
    contested,
    links,
    links_below,
    many_files,
    many_layers,
    opaque_root,
    random_stacks,
)


def write_zoo_layout(directory: Path, layers: Layers, *, gzip_only: bool = False) -> Path:
    """Write an OCI layout of one image with these layers, tagged "latest"."""
    layout = LayoutBuilder(directory)
    layout.add_image(
        [tar for tar, _ in layers],
        compression="gzip" if gzip_only else [compression for _, compression in layers],
    )
    return directory


ZOO: Mapping[str, Callable[[Path], Layers]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        dialects,
        tools,
        attributes,
        names,
        changes,
        links,
        links_below,
        global_headers,
        contested,
        opaque_root,
        random_stacks,
        many_files,
        many_layers,
    )
}
