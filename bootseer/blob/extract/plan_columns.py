"""Columns for the workers of an extraction, of a tree and its plan. Pure."""

import stat
from array import array
from collections.abc import Mapping
from itertools import chain

from bootseer.blob.extract.plan import Plan
from bootseer.blob.extract.sections import SETTINGS, Section
from bootseer.blob.frames import FrameTable
from bootseer.blob.tree import Tree


def worker_columns(
    tree: Tree, plan: Plan, settings: Mapping[str, int], recorded: bytes
) -> dict[str, Section]:
    """What a worker needs to carry out the tasks: the columns of `extract_sections`.

    Without owners, set-ID bits that would hand our rights to a program meant for another's are
    left out of `mode`.
    """
    c = tree.columns
    name_of = array("I", bytes(4 * tree.inode_count))
    for i in plan.directories:
        name_of[c.name_inode[i]] = i
    bases, firsts = array("Q", [0]), array("I", [0])
    offsets, stream_offsets = array("Q"), array("Q")
    digests = []
    for blob in tree.blobs:
        frames = blob.frames
        if isinstance(frames, FrameTable):
            ends, stream_ends = frames.offsets, frames.stream_offsets
            digests.append(frames.digests)
        else:
            ends = array("Q", [0, *(frame.offset + frame.length for frame in frames)])
            stream_ends = array(
                "Q", [0, *(frame.stream_offset + frame.stream_length for frame in frames)]
            )
            digests.append(b"".join(frame.digest for frame in frames))
        base = bases[-1]
        offsets.extend(array("Q", [base + end for end in ends]))
        stream_offsets.extend(stream_ends)
        bases.append(base + (blob.size_bytes if frames else blob.stream_length))
        firsts.append(firsts[-1] + len(frames))
    part_start, places = array("I", [0]), array("Q")
    for _, part in plan.parts:
        places.extend(chain.from_iterable(part))
        part_start.append(part_start[-1] + len(part))
    return {
        "settings": array("q", [settings[name] for name in SETTINGS]),
        "names": b"".join(name + b"\0" for name in c.names),
        "name_parent": c.name_parent,
        "name_inode": c.name_inode,
        "directory_name": name_of,
        "mode": _modes(tree, settings),
        "uid": c.uid,
        "gid": c.gid,
        "mtime_ns": c.mtime_ns,
        "size_bytes": c.size_bytes,
        "extent_start": c.extent_start,
        "extent_file_offset": c.extent_file_offset,
        "extent_blob": c.extent_blob,
        "extent_blob_offset": c.extent_blob_offset,
        "extent_length": c.extent_length,
        "blob_base": bases,
        "blob_frame": firsts,
        "frame_offset": offsets,
        "frame_stream_offset": stream_offsets,
        "frame_digests": b"".join(digests),
        "files": plan.files,
        "group_start": plan.group_start,
        "part_name": array("I", [i for i, _ in plan.parts]),
        "part_start": part_start,
        "places": places,
        "recorded": recorded,
    }


def _modes(tree: Tree, settings: Mapping[str, int]) -> "array[int]":
    c = tree.columns
    if settings["owners"] or not any(mode & 0o6000 for mode in set(c.mode)):
        return c.mode
    modes = array("I", c.mode)
    for number, mode in enumerate(modes):
        if c.uid[number] != settings["uid"]:
            mode &= ~stat.S_ISUID
        if c.gid[number] != settings["gid"]:
            mode &= ~stat.S_ISGID
        modes[number] = mode
    return modes
