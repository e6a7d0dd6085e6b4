"""The choice of the way in which a snapshot is put in place: mounted, linked or extracted. Pure (no
I/O).

Alone decides it, from facts that `restore_modes` has found; every choice comes with its reason,
which people are told. docs/snapshots.md says what each way means for a job.
"""

from msgspec import Struct

AUTO = "auto"
MOUNT = "mount"
LINK = "link"
HARDLINK = "hardlink"
EXTRACT = "extract"

OVERLAY = "overlay"
REFLINK = "reflink"

# Below both of these an extraction ends before the server of a mount could be started: 0.3 s of
# one processor.
SMALL_BYTES = 16 * 1024 * 1024
SMALL_COUNT = 1000
# Each mounted target has a server of its own.
TARGETS_MAX = 8


class Facts(Struct, frozen=True):
    """What the choice depends on."""

    may_mount: bool
    """This process may mount file systems: CAP_SYS_ADMIN, and not of a user namespace only."""
    has_fuse: bool
    """/dev/fuse can be opened."""
    is_container: bool
    """The targets lie in an image's root that this very start has made."""
    is_throwaway: bool
    """The targets' file system goes with the container in which this runs: an overlay."""
    all_whole: bool
    """There was nothing before: no target is a difference."""
    has_mounts_inside: bool
    """Something is mounted below a target: a mount on the target would hide it."""
    is_entered: bool
    """This process, or the process that started it, works in a target: they would stay below a
    mount."""
    has_trees: bool
    """The node's cache holds the extracted trees of all targets."""
    can_reflink: bool
    """Files of that cache and of the targets can share their blocks."""
    can_hard_link: bool
    """The cache and the targets are on one file system."""
    target_count: int
    file_count: int
    content_bytes: int
    lingers: bool = False
    """The next start on this node is meant to find it."""


class Choice(Struct, frozen=True):
    """The way, and why."""

    mode: str
    """MOUNT, LINK, HARDLINK or EXTRACT."""
    reason: str
    """The rest of the sentence "mounted: ..."."""
    method: str = ""
    """The method of LINK: OVERLAY or REFLINK."""
    is_refusal: bool = False
    """What was asked for is not possible; the reason says why."""

    def sentence(self) -> str:
        """Returns the choice as a sentence for people."""
        done = {MOUNT: "mounted", LINK: "linked", HARDLINK: "hard-linked", EXTRACT: "extracted"}
        return f"{done[self.mode]}: {self.reason}"


def choose(wanted: str, facts: Facts) -> Choice:
    """The way in which to restore; `wanted`, one of `config.RESTORE_MODES`, if it is possible."""
    if wanted == EXTRACT:
        return Choice(EXTRACT, "it was asked for")
    if wanted == MOUNT:
        problem = _why_not_mounted(facts)
        return _refused(problem, "mounted") if problem else Choice(MOUNT, "it was asked for")
    if wanted == HARDLINK:
        if not facts.can_hard_link:
            return _refused("the node's cache is on another file system", "hard-linked")
        return Choice(HARDLINK, "it was asked for")
    if wanted == LINK:
        method, problem = _link_method(facts)
        return _refused(problem, "linked") if problem else Choice(LINK, _said(method), method)
    return _automatic(facts)


def fallback(error: str) -> Choice:
    """After a choice that did not work out."""
    return Choice(EXTRACT, error, is_refusal=True)


def _refused(problem: str, done: str) -> Choice:
    return Choice(EXTRACT, f"it cannot be {done}: {problem}", is_refusal=True)


def _why_not_mounted(facts: Facts) -> str:
    if facts.is_container:
        return "it belongs into an image's root, which is mounted itself"
    if not facts.may_mount:
        return "mounting needs root (CAP_SYS_ADMIN)"
    if not facts.has_fuse:
        return "there is no /dev/fuse"
    return _why_not_covered(facts)


def _why_not_covered(facts: Facts) -> str:
    if facts.has_mounts_inside:
        return "something else is mounted inside a target"
    if facts.is_entered:
        return "the working directory lies in a target, and would not see the mount"
    return ""


def _link_method(facts: Facts) -> tuple[str, str]:
    """(method, why there is none)."""
    if facts.can_reflink and not facts.is_container:
        return REFLINK, ""
    if not facts.may_mount:
        return "", (
            "files here cannot share blocks (reflink) with the node's cache, and an overlay over "
            "it needs root"
        )
    if problem := _why_not_covered(facts):
        return "", problem
    return OVERLAY, ""


def _said(method: str) -> str:
    if method == REFLINK:
        return "files share their blocks with this node's cache"
    return "an overlay over this node's cache"


def _automatic(facts: Facts) -> Choice:
    is_small = facts.content_bytes < SMALL_BYTES and facts.file_count < SMALL_COUNT
    # An image's root is another one then, while the node keeps a tree for it.
    is_kept = facts.has_trees or (facts.lingers and facts.is_container)
    if is_small and not is_kept:
        return Choice(EXTRACT, "it is small")
    method, problem = _link_method(facts)
    if facts.is_container:
        # What is written to an image's root goes with the job: extracted there, it would be
        # extracted at every start.
        if method:
            return Choice(LINK, _said(method), method)
        return Choice(EXTRACT, problem)
    if facts.has_trees and method == REFLINK:
        return Choice(LINK, _said(method), method)
    # Whatever else is written to such a directory would be gone with the mount.
    holds_others = not facts.all_whole and not facts.is_throwaway
    problem = _why_not_mounted(facts)
    if problem and facts.has_trees and method and not holds_others:
        return Choice(LINK, _said(method), method)
    if problem:
        return Choice(EXTRACT, problem)
    if holds_others:
        return Choice(EXTRACT, "it changes directories that hold other things as well")
    if facts.target_count > TARGETS_MAX:
        return Choice(EXTRACT, f"{facts.target_count} targets are too many mounts")
    return Choice(MOUNT, "root and FUSE are available")
