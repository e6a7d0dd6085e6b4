"""Images with everything nasty in them that a container engine still unpacks.

Layers are tars of every dialect: by hand, header for header, where no tool would write them so, and
by GNU tar, bsdtar and Python where the point is what real tools write. `ZOO` maps a name to a
function that makes the layers, each an uncompressed tar and how it is stored.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from testbed.images.building import Layout
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
    """An OCI layout of one image, tagged "latest"."""
    layout = Layout(directory)
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
