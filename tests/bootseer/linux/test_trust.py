"""Folders and configuration are believed if they are the user's own or root's."""

import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.errors import InvalidInputError, exit_code_of
from bootseer.launch.doctor import CheckStatus, examine
from bootseer.linux.ownership import Owners, fault_of_folder, parse_owners
from bootseer.linux.private_files import (
    make_private_directory,
    open_private_directory,
    write_private_file,
)
from bootseer.served.service import LINK, ServiceState, new_service_dir, read_state, write_state
from bootseer.settings.config import Config, load_config
from bootseer.timeline import Timeline
from testbed.needs import MissingError
from testbed.users import NOBODY, as_ordinary_user

root_only = pytest.mark.needs("root")


def loaded(home: Path, **variables: str) -> Config:
    environ = {f"BOOTSEER_{name}": value for name, value in variables.items()}
    return load_config({}, {"HOME": str(home), **environ})


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir(0o700)
    return path


@root_only
def test_a_configuration_of_another_user_is_left_out(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (home / ".config/bootseer").mkdir(parents=True)
    (home / ".config/bootseer/bootseer.toml").write_text('job = "mine"\n')
    planted = tmp_path / "bootseer.toml"
    planted.write_text('store = "file:///evil"\n')
    os.chown(planted, NOBODY, NOBODY)
    monkeypatch.chdir(tmp_path)
    config = loaded(home)
    assert config.settings.store_url == (home / ".local/share/bootseer/store").as_uri()
    assert config.settings.job == "mine"
    (message,) = caplog.messages
    assert f"{planted} is not used: it belongs to user nobody" in message
    # Whoever names it wants it.
    assert loaded(home, CONFIG=str(planted)).settings.store_url == "file:///evil"
    assert loaded(home, TRUSTED_OWNERS="nobody").settings.store_url == "file:///evil"


def test_a_configuration_that_others_may_write_is_left_out(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = tmp_path / "bootseer.toml"
    written.write_text('job = "x"\n')
    monkeypatch.chdir(tmp_path)
    assert loaded(home).settings.job == "x"
    written.chmod(0o666)
    assert loaded(home).settings.job != "x"
    assert "can be changed by everybody" in caplog.text
    # A pipe is not read, and no device is opened.
    written.unlink()
    os.mkfifo(written)
    assert loaded(home).settings.job != "x"
    assert f"{written} is not used: it is a pipe, not a regular file" in caplog.text


@root_only
@pytest.mark.parametrize("how", ["link", "folder", "link to folder", "writable folder", "comm"])
def test_a_configuration_that_another_user_can_exchange_is_left_out(
    tmp_path: Path,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    """A link to a root-owned /proc/PID/comm, whose text another user chooses, once set root's
    store."""
    ours = tmp_path / "ours.toml"
    ours.write_text('job = "x"\n')
    work = tmp_path / "work"
    work.mkdir()
    named = work / "bootseer.toml"
    if how in ("link", "comm"):
        named.symlink_to(ours if how == "link" else "/proc/self/comm")
        os.chown(named, NOBODY, NOBODY, follow_symlinks=False)
    elif how == "link to folder":
        (tmp_path / "between").symlink_to(tmp_path)
        os.chown(tmp_path / "between", NOBODY, NOBODY, follow_symlinks=False)
        named.symlink_to("../between/ours.toml")
    else:
        ours.rename(named)
        if how == "folder":
            os.chown(work, NOBODY, NOBODY)
        else:
            work.chmod(0o777)
    monkeypatch.chdir(work)
    assert loaded(home).settings.job != "x"
    (message,) = caplog.messages
    assert f"the configuration {named} is not used: {tmp_path}" in message
    # Whoever names it wants it.
    job = loaded(home, CONFIG=str(named)).settings.job if how != "comm" else "x"
    assert job == "x"


@root_only
def test_a_mounted_config_map_is_believed(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every link of a ConfigMap belongs to root."""
    volume = tmp_path / "volume"
    (volume / "..2026").mkdir(parents=True)
    (volume / "..2026/bootseer.toml").write_text('job = "mapped"\n')
    (volume / "..data").symlink_to("..2026")
    (volume / "bootseer.toml").symlink_to("..data/bootseer.toml")
    monkeypatch.chdir(volume)
    assert loaded(home).settings.job == "mapped"
    assert not caplog.messages


@root_only
def test_a_read_only_mount_is_changed_by_nobody(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "bootseer.toml").write_text('job = "mapped"\n')
    volume.chmod(0o777)
    code = (
        "import os; from bootseer.settings.config import load_config\n"
        "print(load_config({}, {'HOME': '/root'}).settings.job)"
    )
    mount = (
        f"mount --bind {volume} {volume} && mount -o remount,bind,ro {volume} && cd {volume} && "
        f'exec {sys.executable} -c "$0"'
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, code], capture_output=True, text=True, timeout=120
    )
    if "unshare" in done.stderr or "mount" in done.stderr.split(":")[0]:
        raise MissingError(f"no mounts here: {done.stderr}")
    assert (done.stdout, done.stderr) == ("mapped\n", "")


def test_what_is_named_must_be_a_regular_file(tmp_path: Path, home: Path) -> None:
    """A pipe without a writer once was an empty configuration, as was one with a slow writer."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, kind in ((pipe, "a pipe"), (Path("/dev/zero"), "a device"), (tmp_path, "a folder")):
        with pytest.raises(
            InvalidInputError, match=f"{path} cannot be used: it is {kind}"
        ) as found:
            loaded(home, CONFIG=str(path))
        assert exit_code_of(found.value) == 2
    reading, writing = os.pipe()
    try:
        os.write(writing, b'job = "x"\n')
        with pytest.raises(InvalidInputError, match="it is a pipe"):
            loaded(home, CONFIG=f"/dev/fd/{reading}")
    finally:
        os.close(reading)
        os.close(writing)
    assert loaded(home, CONFIG="/dev/null").settings.store_url.endswith("bootseer/store")
    link = tmp_path / "link.toml"
    (tmp_path / "a.toml").write_text('job = "linked"\n')
    link.symlink_to("a.toml")
    assert loaded(home, CONFIG=str(link)).settings.job == "linked"


@root_only
@pytest.mark.parametrize("name", ["cache_dir", "run_dir", "timeline_dir", "registry_hosts_dir"])
@pytest.mark.parametrize("how", ["folder", "parent", "link", "entry", "writable"])
def test_a_folder_that_another_user_can_change_is_not_used(
    tmp_path: Path, home: Path, caplog: pytest.LogCaptureFixture, name: str, how: str
) -> None:
    if name == "timeline_dir" and how == "entry":
        raise MissingError(
            "each job has a folder of its own there, which is looked at when it is used"
        )
    folder = tmp_path / "parent" / "folder"
    (folder / "streams").mkdir(parents=True)
    wanted = folder
    if how == "folder":
        os.chown(folder, NOBODY, NOBODY)
    elif how == "parent":
        os.chown(folder.parent, NOBODY, NOBODY)
    elif how == "entry":
        os.chown(folder / "streams", NOBODY, NOBODY)
    elif how == "writable":
        folder.chmod(0o777)
    else:
        wanted = tmp_path / "link"
        wanted.symlink_to(folder)
        os.chown(wanted, NOBODY, NOBODY, follow_symlinks=False)
    config = loaded(home, **{name.upper(): str(wanted)})
    used = getattr(config.settings, name)
    assert used not in (wanted, folder)
    assert config.sources[name] == f"instead of {wanted}"
    assert f"{name} {wanted} is not used, but {used}" in caplog.text
    # Everything is ours again, or wanted so.
    assert (
        getattr(loaded(home, **{name.upper(): str(wanted), "TRUSTED_OWNERS": "all"}).settings, name)
        == wanted
    )


@root_only
def test_a_group_may_be_trusted_with_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    os.chown(folder, 0, 4321)
    folder.chmod(0o2775)
    assert "the group 4321" in fault_of_folder(folder, Owners())
    assert fault_of_folder(folder, parse_owners("@4321")) == ""
    # A group of one's own, as many systems make it.
    os.chown(folder, 0, 0)
    assert fault_of_folder(folder, Owners()) == ""


@root_only
def test_an_access_control_list_lets_others_in(tmp_path: Path) -> None:
    """The list's mask shows as the bits of a group without members."""

    def entry(tag: int, rights: int, user: int = 2**32 - 1) -> bytes:
        return struct.pack("<HHI", tag, rights, user)

    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    rights = (entry(1, 7), entry(2, 7, NOBODY), entry(4, 0), entry(16, 7), entry(32, 0))
    try:
        os.setxattr(folder, "system.posix_acl_access", struct.pack("<I", 2) + b"".join(rights))
    except OSError as error:
        raise MissingError(
            f"the file system of {tmp_path} has no access control lists: {error}"
        ) from error
    assert "access control list" in fault_of_folder(folder, Owners())
    assert fault_of_folder(folder, parse_owners("@0")) == ""


def test_owners_are_names_numbers_and_groups() -> None:
    # root is trusted whoever else is.
    assert parse_owners("root, 1000,@root,@77") == Owners(frozenset({1000}), frozenset({0, 77}))
    assert parse_owners("all").is_everybody
    for text in ("no-such-user", "@no-such-group"):
        with pytest.raises(InvalidInputError, match="is not a "):
            parse_owners(text)


def test_of_a_folder_for_all_users_each_has_a_part(
    tmp_path: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    scratch.chmod(0o1777)
    settings = loaded(home, CACHE_DIR=str(scratch), TIMELINE_DIR=str(scratch)).settings
    assert settings.cache_dir == scratch / f"bootseer-{os.geteuid()}"
    assert stat.S_IMODE(settings.cache_dir.stat().st_mode) == 0o700
    assert settings.timeline_dir == scratch
    # It is what such a folder is for, at each start.
    assert not caplog.messages


@root_only
def test_a_part_that_another_user_has_taken_is_not_used(tmp_path: Path, home: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    scratch.chmod(0o1777)
    taken = scratch / f"bootseer-{os.geteuid()}"
    taken.mkdir()
    os.chown(taken, NOBODY, NOBODY)
    assert loaded(home, CACHE_DIR=str(scratch)).settings.cache_dir == home / ".cache/bootseer"


@root_only
def test_a_folder_of_another_user_is_not_made_private(tmp_path: Path) -> None:
    theirs = tmp_path / "streams"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match="belongs to user 65534"):
        make_private_directory(theirs)
    os.chown(tmp_path, NOBODY, NOBODY)  # Who was trusted with all of it.
    make_private_directory(theirs)


@root_only
@pytest.mark.parametrize("how", ["job is a link", "attempt is a link", "job is theirs"])
def test_nothing_is_written_through_a_shared_timeline_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    shared, secret = tmp_path / "timelines", tmp_path / "secret"
    shared.mkdir()
    shared.chmod(0o1777)
    (secret / "0").mkdir(parents=True)
    if how == "job is a link":
        (shared / "train").symlink_to(secret)
    elif how == "attempt is a link":
        (shared / "train").mkdir()
        (shared / "train/0").symlink_to(secret / "0")
    else:
        (shared / "train/0").mkdir(parents=True)
        os.chown(shared / "train", NOBODY, NOBODY)
    timeline = Timeline.start(shared, job="train", submission="", attempt=0, node="n", rank=0)
    assert not timeline.is_written
    assert "no timeline for this start" in caplog.text
    assert not list(secret.rglob("*.jsonl"))
    assert not list(shared.rglob("*.jsonl"))


def test_a_folder_below_a_shared_one_is_private(tmp_path: Path) -> None:
    fd = open_private_directory(tmp_path / "shared", ["job", "0"])
    os.close(fd)
    for path in ("shared", "shared/job", "shared/job/0"):
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == 0o700


@root_only
def test_doctor_says_whose_a_folder_is(tmp_path: Path, home: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    os.chown(cache, NOBODY, NOBODY)
    environ = {"HOME": str(home), "BOOTSEER_CACHE_DIR": str(cache), "BOOTSEER_RUN_DIR": str(home)}
    settings = load_config({}, environ, checks_folders=False).settings
    (found,) = [one for one in examine(settings) if one.name == "trust"]
    assert found.status is CheckStatus.WARN
    assert f"cache_dir is not used: {cache} belongs to user nobody" in found.seen


@root_only
def test_a_start_goes_on_without_the_folders_of_others(tmp_path: Path, home: Path) -> None:
    """Each folder costs one warning and gets no files, and the command runs."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    (theirs / "bootseer.toml").write_text("= broken")
    os.chown(theirs / "bootseer.toml", NOBODY, NOBODY)
    environ = {**os.environ, "HOME": str(home), "XDG_RUNTIME_DIR": ""}
    for name in ("CACHE_DIR", "RUN_DIR", "TIMELINE_DIR"):
        environ[f"BOOTSEER_{name}"] = str(theirs / name.lower())
    done = subprocess.run(
        [sys.executable, "-m", "bootseer", "run", "--", "echo", "started"],
        cwd=theirs,
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, "started\n")
    assert [line.split(" is not used")[0] for line in done.stderr.splitlines()] == [
        f"bootseer: warning: {what}"
        for what in (
            f"the configuration {theirs}/bootseer.toml",
            f"cache_dir {theirs}/cache_dir",
            f"run_dir {theirs}/run_dir",
            f"timeline_dir {theirs}/timeline_dir",
        )
    ]
    assert os.listdir(theirs) == ["bootseer.toml"]


@root_only
def test_a_store_in_the_home_of_another_user_is_not_the_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`sudo` may keep HOME: root would run code that the folder's owner has stored."""
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    config = load_config({}, {"HOME": str(home), "XDG_RUNTIME_DIR": ""})
    assert config.settings.store_url == "file:///var/lib/bootseer/store"
    assert config.sources["store_url"] == f"instead of {home}/.local/share/bootseer/store"
    assert "store_url" in caplog.text
    named = (home / "store").as_uri()
    assert load_config({"store_url": named}, {"HOME": str(home)}).settings.store_url == named


@root_only
def test_a_folder_that_a_user_cannot_make_is_replaced(tmp_path: Path) -> None:
    """The job starts without /run/bootseer/alice, which the node did not make at its boot."""
    code = (
        "import os, pwd, sys; from bootseer.settings.config import load_config\n"
        "os.setuid(4321)\n"
        "environ = {'HOME': '/', 'BOOTSEER_RUN_DIR': '/run/missing/alice'}\n"
        "print(load_config({}, environ).settings.run_dir)"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, cwd="/", check=True)
    own = "/var/tmp/bootseer-4321/.cache/bootseer/run"
    assert done.stdout.strip() == own
    assert f"/run/missing/alice is not used, but {own}: it is missing" in done.stderr


@root_only
def test_a_folder_that_only_a_capability_opens_can_be_written(tmp_path: Path) -> None:
    """access(2) looks at the rights of the user alone."""
    closed = tmp_path / "closed"
    own = closed / "own"
    own.mkdir(parents=True)
    os.chown(own, NOBODY, NOBODY)
    closed.chmod(0o700)
    code = "import pathlib, sys; from bootseer.linux.ownership import unwritable_folder\n"
    code += "print(unwritable_folder(pathlib.Path(sys.argv[1])))"
    user = as_ordinary_user(reading_all=True)
    words = [*user, sys.executable, "-c", code, str(own / "missing")]
    done = subprocess.run(words, capture_output=True, text=True, cwd="/", check=True, timeout=60)
    assert done.stdout == "None\n"


@root_only
def test_a_service_that_another_user_describes_is_none(tmp_path: Path) -> None:
    """Its state says what to unmount, kill and remove."""
    folder = new_service_dir(tmp_path)
    state = ServiceState(folder.name, "", "", "", "/mnt", 1, 1, LINK)
    write_state(folder, state)
    assert read_state(folder) == state
    os.chown(folder / "state.json", NOBODY, NOBODY)
    assert read_state(folder) is None


def test_a_file_that_cannot_be_replaced_leaves_no_other(tmp_path: Path) -> None:
    place = tmp_path / "folder"
    (place / "file").mkdir(parents=True)
    place.chmod(0o700)
    with pytest.raises(IsADirectoryError):
        write_private_file(place / "file", b"x")
    assert os.listdir(place) == ["file"]
