"""What containerd says of a node: `ctr events`, one line an event. Pure (no I/O).

A download is no event: an image is seen from when its first layer is unpacked. Times are of the
node's own clock.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from bootseer.profile.adapters.known import STAGES_MAX, Known, clean, instant, lines
from bootseer.profile.model.tracks import CONTAINERD

_EVENT = re.compile(r"(\S{10} \S{8,20} [+-]\d{4}) UTC (\S{1,76}) (/\S{1,64}) (\{.*\})")
_UNPACKED = "extract-"


def parse_containerd(data: bytes) -> list[Known]:
    """The stages of each container: its image unpacked, then it was created and started."""
    found: list[Known] = []
    containers: dict[tuple[str, str], tuple[int, str]] = {}
    unpacked: dict[str, tuple[int, int]] = {}
    tasks: dict[tuple[str, str], int] = {}
    for when, namespace, topic, event in _events(data):
        if len(found) >= STAGES_MAX:
            break
        name = clean(event.get("id") or event.get("container_id"))
        key = (namespace, name)
        unit = containers.get(key, (0, ""))[1]
        if topic in ("/snapshot/prepare", "/snapshot/commit"):
            if clean(event.get("key")).startswith(_UNPACKED):
                begin, _ = unpacked.get(namespace, (when, when))
                unpacked[namespace] = begin, when
        elif topic == "/containers/create":
            containers[key] = when, f"{namespace}/{name} {when}"
            image = clean(event.get("image"))
            if namespace in unpacked:
                begin, end = unpacked.pop(namespace)
                found.append(_known("image unpack", begin, end, containers[key][1], image))
        elif topic == "/tasks/create" and unit:
            tasks[key] = when
            found.append(_known("container create", containers[key][0], when, unit))
        elif topic == "/tasks/start" and key in tasks:
            found.append(_known("container start", tasks.pop(key), when, unit))
    return found


def _events(data: bytes) -> Iterator[tuple[int, str, str, dict[str, Any]]]:
    for line in lines(data):
        match = _EVENT.match(line)
        when = instant(match[1]) if match else None
        if match is None or when is None:
            continue
        try:
            event = json.loads(match[4])
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield when, match[2], match[3], event


def _known(name: str, begin: int, end: int, unit: str, image: str = "") -> Known:
    return Known(
        name=name,
        role=CONTAINERD,
        begin_ns=begin,
        end_ns=end,
        clock="containerd",
        unit=unit,
        attributes={"container.image": image} if image else {},
    )
