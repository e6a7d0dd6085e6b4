"""Containers over mounted images, for `bootseer run --image`.

The server mounts the tree in the host's mount namespace. A private mount namespace gets a copy of
that mount, with an overlay and other mounts on top. Then the tree is unmounted in the host's
namespace. So all mounts live as long as the last process of the private namespace: after its end,
the kernel drops the mounts, and the server ends and cleans up.

A `Container` is for the main thread only.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Unpack

from msgspec import Struct, field
from msgspec.structs import replace

from bootseer.base.documents import to_line
from bootseer.errors import BootseerError, InvalidInputError, UnsupportedError, from_oserror
from bootseer.fuse.kernel.mount import can_mount_directly
from bootseer.linux import namespaces
from bootseer.linux.disk_usage import UNWRITABLE
from bootseer.linux.mount_table import find_mount
from bootseer.linux.private_files import make_private_directory, private_directory
from bootseer.linux.processes import wait_single_threaded
from bootseer.linux.root_paths import resolve_in_root
from bootseer.linux.scripts import RunOptions
from bootseer.prefetch.container.process import (
    ProcessSpec,
    User,
    become,
    become_user_in,
    job_environment,
    resolve_user,
)
from bootseer.prefetch.container.root import Bind, mount_overlay, parse_bind, populate
from bootseer.prefetch.images.find import publish_later
from bootseer.prefetch.images.mount import MountedImage, mount_image
from bootseer.prefetch.index.node_catalogue import FoundImage
from bootseer.prefetch.index.records import ImageConfig
from bootseer.prefetch.serve.plan import ServeOptions
from bootseer.served.ending import announce_scratch, kill_silent, make_own_scratch
from bootseer.served.processes import TREE, Process, start
from bootseer.served.ready_socket import VARIABLE as READY_VARIABLE
from bootseer.served.ready_socket import add_ready_names
from bootseer.served.service import RUN, is_alive, lingering_services, new_service_dir
from bootseer.served.users import join
from bootseer.settings.config import Settings
from bootseer.timeline.otlp import LIVE

if TYPE_CHECKING:
    from bootseer.prefetch.container.extracted import ExtractedImage

_log = logging.getLogger(__name__)

_THREADS_END_S = 5.0
"""Time for threads that have done their work to end in the kernel."""
CHROOT, RUNC = "chroot", "runc"
"""Programs that start a job in the root: chroot by this process, without isolation; or runc."""


class Container(Struct):
    """Mounted image with a writable root that can be entered. Made by `prepare_container`."""

    image: "MountedImage | ExtractedImage"
    root: Path
    """Writable root. It is empty before `enter`, and in the namespaces of other processes."""
    scratch: Path
    """Folder for the files that the container writes."""
    rootless: bool
    user: str
    """User of its processes, as in an image's configuration; "" is root."""
    runtime: str = CHROOT
    """Program that starts the job: CHROOT or RUNC."""
    binds: list[Bind] = field(default_factory=list)
    how: str = ""
    """Origin of its tree: "mounted", "changed" (mounted although another tree lingers), or LIVE
    (still mounted from an earlier start)."""
    lingers: bool = False
    """Whether later containers may use the same tree, each with a scratch folder of its own."""
    entered: bool = False
    has_namespace: bool = False
    """Whether this process has left the host's mount namespace for one of its own."""

    @property
    def ready_name(self) -> str:
        return self.image.ready_name

    @property
    def config(self) -> ImageConfig:
        return self.image.record.config

    def bind(self, source: Path, target: str, *, read_only: bool = False) -> None:
        """Show a path of the host at `target` of the container. Must be called before `enter`."""
        if self.entered:
            raise InvalidInputError("binds must be named before the container is entered")
        if not target.startswith("/"):
            raise InvalidInputError(f"cannot bind to {target}: it must begin with /")
        self.binds.append(Bind(source, target, read_only))

    def enter(self) -> None:
        """Move this process into the container's mount namespace, and build the root there.

        The host's files stay visible until `exec`. Idempotent.
        Raises: UnsupportedError, BootseerError; the process should end then.
        """
        if self.entered:
            return
        self._unshare()
        self.has_namespace = True
        if self.lingers:
            self.scratch = make_own_scratch(self.scratch)
        mount_overlay(self.image.directory, self.scratch, self.root, rootless=self.rootless)
        # Created as docker does, since images may name a folder that they do not have.
        working_dir = resolve_in_root(self.root, self.config.working_dir or "/")
        working_dir.mkdir(parents=True, exist_ok=True)
        populate(self.root, self.binds)
        if not self.lingers:
            self.image.detach()
        self.entered = True

    def _unshare(self) -> None:
        uid, gid = os.geteuid(), os.getegid()
        flags = namespaces.CLONE_NEWNS
        if self.rootless:
            # The kernel refuses a user namespace to a process with threads (EINVAL).
            wait_single_threaded(_THREADS_END_S)
        try:
            namespaces.unshare(flags | (namespaces.CLONE_NEWUSER if self.rootless else 0))
            if self.rootless:
                namespaces.map_user(uid, gid)
            namespaces.make_private()
        except OSError as error:
            raise UnsupportedError(
                f"cannot make namespaces for a container: {error.strerror}; run as root, or allow "
                "user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_"
                "unprivileged_userns); `bootseer image mount` works without"
            ) from error

    # ---- running ------------------------------------------------------------------------------

    def job_environment(self, host: Mapping[str, str]) -> dict[str, str]:
        """Return the launcher's variables that are valid in the container, and the image's."""
        home = {"HOME": self.job_user().home}
        ready = {READY_VARIABLE: host.get(READY_VARIABLE, "")}
        environment = {**home, **job_environment(self.config, host), **ready}
        add_ready_names(environment, self.ready_name)
        return environment

    def job_user(self) -> User:
        """Return the user of the job. Raises: InvalidInputError if the image lacks that user."""
        return resolve_user(self.root if self.entered else self.image.directory, self.user)

    def run(
        self, args: Sequence[str], /, **options: Unpack[RunOptions]
    ) -> "subprocess.CompletedProcess[bytes]":
        """Enter the container, and run a program of it as its root user with `subprocess.run`.

        Raises: as `enter`; OSError if the program cannot be started; TimeoutExpired.
        """
        self.enter()
        working_dir = options.pop("cwd", None) or self.config.working_dir or "/"

        def into_root() -> None:
            os.chroot(self.root)
            # To the root first: the current folder, where a relative path begins, is outside.
            os.chdir("/")
            os.chdir(working_dir)

        if options.get("env") is None:
            options["env"] = self.job_environment(os.environ)
        return subprocess.run(args, check=False, preexec_fn=into_root, **options)

    def enter_copy(self) -> None:
        """Move a copy of this process, which has entered, to root, folder and user of the job.

        Raises: OSError, BootseerError.
        """
        user = self.job_user()
        # `change_root` would move the original process as well.
        os.chroot(self.root)
        os.chdir("/")
        become_user_in(self.config.working_dir or "/", user, rootless=self.rootless)

    def exec(self, arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
        """Replace this process by a program of the image, or by runc that runs it.

        `arguments` and `environment` are all of the program's; see `arguments_of` and
        `job_environment`. Raises: as `enter`; SetupFailedError (126, 127) if there is no such
        program.
        """
        self.enter()
        spec = ProcessSpec(
            tuple(arguments), environment, self.config.working_dir or "/", self.job_user()
        )
        if self.runtime == RUNC:
            from bootseer.prefetch.container.runc import exec_runc

            exec_runc(spec, self.root, self.image.state_dir, self.binds)
        namespaces.change_root(self.root)
        become(spec, rootless=self.rootless)

    def close(self) -> None:
        """Unmount the tree if this process has not begun to enter the container.

        If it has begun, the tree is mounted in its own namespace as well, and is unmounted when
        this process ends. A tree that had lingered stays mounted.
        """
        if not self.has_namespace and self.how != LIVE:
            self.image.close()


def prepare_container(
    settings: Settings,
    image: FoundImage,
    *,
    binds: Sequence[str] = (),
    process: Process | None = None,
    user: str | None = None,
    runtime: str = CHROOT,
) -> Container:
    """Mount an image for a container of this process, and start to replay its bundle.

    A tree of the image that lingers after an earlier start is used again. If this process ends
    before it has entered the container, everything is unmounted. `binds` are "SRC:/DST[:ro]".
    `process` is a server process that was started ahead. `user` replaces that of the image's
    configuration. Raises: as `mount.mount_image`.
    """
    parsed = [parse_bind(text) for text in binds]
    rootless = not can_mount_directly()
    owner = (os.geteuid(), os.getegid()) if rootless else None
    runs_as = image.record.config.user if user is None else user
    try:
        fingerprint = _fingerprint_of(settings, image.record.identity, owner)
        has_other = any(lingering_services(settings.run_dir, RUN, settings.job))
        how, lingers = LIVE, True
        mounted = _take_over(settings, image, fingerprint)
        if mounted is None:
            how, lingers = "changed" if has_other else "mounted", settings.linger_s > 0
            options = ServeOptions(
                purpose=RUN, watch_pid=os.getpid(), owner=owner, fingerprint=fingerprint
            )
            mounted = _mount_tree(settings, image, options, process)
    except BaseException:
        image.release()
        raise
    root, scratch = mounted.state_dir / "root", Path(mounted.state.scratch)
    return Container(mounted, root, scratch, rootless, runs_as, runtime, parsed, how, lingers)


def _mount_tree(
    settings: Settings, image: FoundImage, options: ServeOptions, process: Process | None
) -> MountedImage:
    """Mount the image's tree in the folder of a new service, with a scratch folder.

    `process`: as for `prepare_container`. On an error no folder is left. Raises: as `mount_image`.
    """
    with contextlib.ExitStack() as stack:
        process = process or stack.enter_context(start(TREE, settings.run_dir))
        state_dir = new_service_dir(settings.run_dir, process.identity)
        scratch = settings.cache_dir / "containers" / state_dir.name
        try:
            tree = private_directory(state_dir / "tree")
            private_directory(state_dir / "root")
            announce_scratch(state_dir, scratch)
            scratch = _make_scratch(scratch, state_dir)
            options = replace(options, scratch=str(scratch))
            return mount_image(settings, image, tree, options, state_dir=state_dir, process=process)
        except BaseException:
            with contextlib.suppress(OSError):
                scratch.rmdir()
            if not is_alive(state_dir):
                shutil.rmtree(state_dir, ignore_errors=True)
            raise


def _make_scratch(wanted: Path, state_dir: Path) -> Path:
    """Create the folder for the container's writes. Raises: BootseerError."""
    try:
        make_private_directory(wanted)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise from_oserror(error, f"make the folder {wanted}") from error
        _log.warning(
            "cannot make %s: %s; the files that the container writes go to %s instead",
            wanted,
            error.strerror,
            state_dir,
        )
        return private_directory(state_dir / "scratch")
    return wanted


# ---- trees that linger for the next start ------------------------------------------------------


def _fingerprint_of(settings: Settings, identity: str, owner: tuple[int, int] | None) -> str:
    """Return a fingerprint that is equal for all trees that a start can use.

    `identity` stands for the image, since its index changes when it is published.
    """
    served = [settings.store_url, str(settings.cache_dir), settings.deadline_s]
    values = [identity, settings.workload, os.geteuid(), owner, *served, settings.fill_bytes_per_s]
    return hashlib.sha256(to_line(values).encode()).hexdigest()


def _take_over(settings: Settings, image: FoundImage, fingerprint: str) -> MountedImage | None:
    """Return a lingering tree with this fingerprint, in use by this process from now on.

    A server that does not answer is ended. Return None if there is no such tree. Never raises.
    """
    for service in lingering_services(settings.run_dir, RUN):
        state_dir, state = service
        if state.fingerprint != fingerprint:
            continue
        try:
            service.ask("status")
        except BootseerError as error:
            _log.info("the tree on %s cannot be used again: %s", state.directory, error)
            with contextlib.suppress(OSError):
                kill_silent(state_dir, state)
            continue
        if find_mount(Path(state.directory)) is not None and join(state_dir, None, os.getpid()):
            image.release()
            publish_later(settings, image)
            # Without a ready socket: the record of the tree is complete.
            return MountedImage(settings, image.record, state, state_dir, "")
    return None
