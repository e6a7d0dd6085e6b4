"""Every file that a set-up command reads is in its key, or the key is open; the shell tells."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bootseer.snapshots.commands import hints_of
from bootseer.snapshots.key import Resolved, SetupRequest, resolve
from testbed.needs import MissingError

# Stands in for every installing tool: its result depends on its words, its input, pip's variables,
# and every file that its words or the lists among these files name.
_TOOL = r"""#!/bin/sh
out=$OUT
printf '%s\n' "$0" "$@" "$PIP_CONSTRAINT" "$PIP_REQUIREMENT" >> "$out"
[ -t 0 ] || cat >> "$out"
show() {
    if [ -f "$1" ]; then
        cat "$1" >> "$out"
        sed -n 's/^-[rc] //p' "$1" | while read -r more; do show "$more"; done
    elif [ -p "$1" ]; then
        cat "$1" >> "$out"
    elif [ -d "$1" ]; then
        find "$1" -type f | sort | xargs cat >> "$out"
    fi
}
for word in "$@" $PIP_CONSTRAINT $PIP_REQUIREMENT; do
    show "$word"
    show "${word#*=}"
    show "${word#-r}"
    show "${word%[*}"
done
exit 0
"""
_FILES = {
    "requirements.txt": "-r base.txt\nnumpy==1.0\ntorch==2.0\nsix==1.1\n",
    "base.txt": "idna==3.0\n",
    "more.txt": "attrs==20.1\n",
    "list": "requirements.txt\n",
    "sub/requirements.txt": "toml==1.0\n",
    "sub/inner.sh": "pip install -r requirements.txt\n",
    "make.sh": '#!/bin/sh\npip install -r "$1"\n',
    "functions.sh": "install_all() { pip install -r more.txt; }\n",
    "project/pyproject.toml": "[project]\nname = 'a'\n",
    "project/a.py": "a = 1\n",
    "flag": "yes\n",
    "script.sed": "1d\n",
    "patterns": "torch\n",
}
_COMMANDS = [
    "pip install -r requirements.txt",
    "pip install -rrequirements.txt -c more.txt",
    "pip install --requirement=requirements.txt",
    "grep -v torch requirements.txt | xargs pip install",
    "tail -n +2 requirements.txt | xargs pip install",
    "head -n 3 requirements.txt | xargs -n 1 pip install",
    "cut -d= -f1 requirements.txt | xargs pip install",
    "sed 1d requirements.txt | xargs pip install",
    "sed -f script.sed more.txt | xargs pip install",
    "awk 1 requirements.txt | xargs pip install",
    "sort -u requirements.txt more.txt | xargs pip install",
    "cat requirements.txt | grep -v torch | xargs pip install",
    "grep -vf patterns requirements.txt | xargs pip install",
    "grep -v --file=patterns requirements.txt | xargs pip install",
    "xargs -a requirements.txt pip install",
    "xargs --arg-file=requirements.txt pip install",
    "xargs pip install < requirements.txt",
    "xargs cat < list | xargs pip install",
    'pip install "$(cat requirements.txt)"',
    "pip install $(grep -v torch requirements.txt)",
    "pip install `tail -n 1 requirements.txt`",
    "pip install $(< requirements.txt)",
    "head -n 3 requirements.txt > r2.txt && pip install -r r2.txt",
    "grep -v torch requirements.txt > r2.txt; pip install -r r2.txt",
    "sed '/torch/d' requirements.txt > r2.txt; pip install -r r2.txt",
    "cat requirements.txt more.txt | tee r2.txt > /dev/null; pip install -r r2.txt",
    "cp more.txt r2.txt; pip install -r r2.txt",
    "cp requirements.txt r2.txt; sed -i 1d r2.txt; pip install -r r2.txt",
    "test -f r2.txt || cp more.txt r2.txt; pip install -r r2.txt",
    "pip install -r /dev/stdin < requirements.txt",
    "pip install -r - < requirements.txt",
    "cat requirements.txt | pip install -r /dev/stdin",
    "pip install -r <(grep -v torch requirements.txt)",
    "pip install -r {requirements,more}.txt",
    "pip install -r requirements.[t]xt",
    "pip install -r *irements.txt",
    "for f in requirements more; do pip install -r $f.txt; done",
    "for f in *.txt; do pip install -r $f; done",
    "for f in $(cat list); do pip install -r $f; done",
    "while read -r line; do pip install $line; done < requirements.txt",
    "R=requirements.txt; pip install -r $R",
    "R=requirements; pip install -r ${R}.txt",
    'R=$(cat list); pip install -r "$R"',
    "R=${R:-requirements.txt}; pip install -r $R",
    "pip install -r ${R:-requirements.txt}",
    "if [ -f flag ]; then pip install six==1; fi",
    "test -e flag && pip install six==1 || true",
    "if grep -q yes flag; then pip install six==1; fi",
    "case $(cat flag) in yes*) pip install six==1;; *) pip install six==2;; esac",
    "V=$(cat flag); pip install torch==$V",
    "PIP_CONSTRAINT=more.txt pip install -r requirements.txt",
    "export PIP_CONSTRAINT=more.txt; pip install six==1",
    "env PIP_REQUIREMENT=more.txt pip install six==1",
    "cd sub && pip install -r requirements.txt",
    "(cd sub; pip install -r requirements.txt); pip install six==1",
    "env -C sub pip install -r requirements.txt",
    "cd sub; sh inner.sh",
    "sh ./make.sh more.txt",
    "bash -c 'pip install -r \"$1\"' x more.txt",
    "bash -s < sub/inner.sh",
    "sh make.sh requirements.txt",
    ". ./functions.sh; install_all",
    'f() { pip install -r "$1"; }; f more.txt',
    "eval 'pip install -r more.txt'",
    "trap 'pip install -r more.txt' EXIT",
    "timeout 60 nice -n 5 pip install -r requirements.txt",
    "nohup env A=1 pip install -r requirements.txt > log 2>&1",
    "time -p pip install -r requirements.txt",
    "pip install ./project",
    "pip install -e 'project[dev]'",
    "uv pip install -r requirements.txt",
    "mytool --config flag",
    "mytool --config=flag @more.txt",
    "pip install -r requirements.txt # not more.txt",
    "pip install six==1 <<EOF\n$(cat flag)\nEOF",
    'pip install six==1 <<< "$(cat flag)"',
    "diff more.txt base.txt | xargs pip install; true",
    "echo $(cat more.txt) | xargs pip install",
    "mapfile -t a < more.txt; pip install ${a[@]}",
    "a=(requirements.txt more.txt); for r in ${a[@]}; do pip install -r $r; done",
    "[[ -f flag && $(cat flag) == yes ]] && pip install six==1; true",
    "mv more.txt r3.txt; pip install -r r3.txt",
    "ln -s more.txt r3.txt; pip install -r r3.txt",
    "python3 - < flag; pip install six==1; true",
    "flock lock pip install -r more.txt",
    "pip install -r $PWD/more.txt",
    "cd sub; pip install -r $PWD/requirements.txt",
    "pip install -r {requirements,more}.{txt,in}",
    "uv pip compile more.txt -o r2.txt; uv pip sync r2.txt",
    "{ cat requirements.txt; cat more.txt; } > r2.txt; pip install -r r2.txt",
    "(cd sub && cat requirements.txt) | xargs pip install",
    "while read -r line; do echo $line; done < more.txt | xargs pip install",
    "pip install -r $(cd sub && pwd)/requirements.txt",
    "set -- requirements.txt; pip install -r $1",
    "exec 3< more.txt; xargs pip install <&3",
    "if cd sub; then pip install -r requirements.txt; fi",
    "for d in . sub; do (cd $d; pip install -r requirements.txt); done",
    "A=requirements B=$A.txt; pip install -r $B",
    "X=more; X=requirements; pip install -r $X.txt",
    "F='-r more.txt'; pip install $F six==1",
    "pip install six==1 > /dev/null 2>&1 < flag",
    "! false && pip install -r more.txt",
    "[ -s flag ] && pip install six==1; true",
    "[ $(wc -c < flag) -gt 3 ] && pip install six==1; true",
    "[ more.txt -nt base.txt ] || pip install six==1",
    "function g { pip install -r more.txt; }; g",
    "declare -r R=more.txt; pip install -r $R",
    "printf -v R %s more.txt; pip install -r $R",
    "command pip install -r more.txt",
    "sh -c 'exec pip install -r more.txt'",
    "pip install \\\n  -r more.txt",
    "cat <<EOF > r2.txt\n$(cat more.txt)\nEOF\npip install -r r2.txt",
    "pip install -r \"more.txt\"  -r 'base.txt'",
    "tar cf a.tar more.txt; rm more.txt; tar xf a.tar; pip install -r more.txt",
    "install -m 644 more.txt r2.txt; pip install -r r2.txt",
    "tr a-z A-Z < more.txt > r2.txt; pip install -r r2.txt",
    "nl more.txt | cut -f2 | sort | uniq | head -n 5 | xargs pip install",
    'test "$(cat flag)" = yes && pip install six==1; pip install six==2',
]


class _Bed:
    """Folder with files, and stand-ins for tools."""

    def __init__(self, folder: Path) -> None:
        self.tools = folder / "tools"
        self.tools.mkdir()
        for name in ("pip", "uv", "mytool"):
            (self.tools / name).write_text(_TOOL)
            (self.tools / name).chmod(0o755)
        self.job = folder / "job"
        self.out = folder / "out"
        self.known = folder / "known"
        self.path = f"{self.tools}:{os.environ['PATH']}"

    def fill(self, *changed: str) -> None:
        """Make the files, some of them with another content."""
        shutil.rmtree(self.job, ignore_errors=True)
        for name, text in _FILES.items():
            path = self.job / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + ("attrs==0.5\n" if name in changed else ""))

    def made(self, command: str) -> str:
        """Run a command in the shell and return its result."""
        self.out.write_text("")
        environ = {"PATH": self.path, "OUT": str(self.out), "HOME": "/nonexistent"}
        subprocess.run(
            ["bash", "-c", command],
            cwd=self.job,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=300,
            check=False,
        )
        # Names of pipes differ in each run.
        lines = self.out.read_text(errors="replace").splitlines()
        return "\n".join(line for line in lines if "/dev/fd" not in line)

    def resolved(self, command: str) -> Resolved:
        """Return the product's resolution of a command."""
        request = SetupRequest(
            ["bash", "-c", command],
            targets=["/opt/made-by-nobody"],
            directory=str(self.job),
            environ={"PATH": self.path, "HOME": "/nonexistent"},
        )
        return resolve(request, lambda sentence: None, self.known)


@pytest.fixture(autouse=True)
def cheap_scrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide secrets by a cheap derivation: test_secrets.py tests the real one's cost."""
    real = hashlib.scrypt

    def scrypt(data: bytes, *, salt: bytes, n: int, r: int, p: int) -> bytes:
        return real(data, salt=salt, n=2, r=r, p=p)

    monkeypatch.setattr(hashlib, "scrypt", scrypt)


@pytest.fixture
def bed(tmp_path: Path) -> _Bed:
    return _Bed(tmp_path)


@pytest.mark.parametrize("command", _COMMANDS)
@pytest.mark.needs(programs=["bash"])
def test_what_decides_is_in_the_key_or_the_key_is_open(bed: _Bed, command: str) -> None:
    """Regression: the keys of `grep -v x FILE | xargs pip install`, `$(cat FILE)` and others lacked
    FILE.

    A stale environment was restored for ever.
    """
    for tool in ("flock", "install"):
        if tool in command.split() and shutil.which(tool) is None:
            raise MissingError(f"needs {tool}")
    bed.fill()
    before = bed.resolved(command)
    if before.is_open:
        assert before.unknown
        return
    silent = []
    for name in _FILES:
        bed.fill(name)
        now = bed.resolved(command)
        assert not now.is_open
        if now.parts == before.parts:
            silent.append(name)
    bed.fill()
    plain = bed.made(command)
    assert plain, "a command that does nothing shows nothing"
    bed.fill(*silent)
    assert bed.made(command) == plain, f"one of {silent} decides"


@pytest.mark.parametrize(
    "command",
    [
        "head -n 3 requirements.txt > r2.txt && pip install -r r2.txt",
        "cat requirements.txt more.txt | tee r2.txt > log; pip install -r r2.txt",
        "cp more.txt r2.txt; sed -i 1d r2.txt; pip install -r r2.txt",
        "set -e; (cd sub; cat requirements.txt > r2.txt); pip install -r sub/r2.txt",
        "echo six==1 > r2.txt; pip install -r r2.txt",
        "flock lock pip install -r more.txt",
        "mytool --log my.txt -o out.txt; echo x > my.txt; echo x >> out.txt",
        "date >> log; pip install six==1",
    ],
)
def test_a_file_that_the_command_makes_is_no_input(bed: _Bed, command: str) -> None:
    """Otherwise the set-up would run once more wherever its working directory is kept."""
    bed.fill()
    before = bed.resolved(command)
    bed.made(command)
    assert bed.resolved(command).parts == before.parts


@pytest.mark.parametrize(
    "command",
    [
        "pip install -r r2.txt; head -n 1 more.txt > r2.txt",
        "cat more.txt >> r2.txt; pip install -r r2.txt",
        "test -e flag || cp more.txt r2.txt; pip install -r r2.txt",
        "test -e flag && cp more.txt r2.txt; pip install -r r2.txt",
        "if false; then cp more.txt r2.txt; fi; pip install -r r2.txt",
        "(false && cp more.txt r2.txt) || pip install -r r2.txt",
        "f() { cp more.txt r2.txt; }; pip install -r r2.txt",
        "cp more.txt sub/r2.txt; pip install -r r2.txt",
    ],
)
def test_a_file_that_may_be_read_before_it_is_made_is_an_input(bed: _Bed, command: str) -> None:
    keys = set()
    for text in ("one==1\n", "two==2\n"):
        bed.fill()
        (bed.job / "r2.txt").write_text(text)
        keys.add(bed.resolved(command).parts)
    assert len(keys) == 2


def test_files_of_the_kernel_and_files_with_secrets_open_the_key(bed: _Bed) -> None:
    """The digest of a password lets readers of the store try a list of passwords."""
    for command, name in (
        ("grep MemFree /proc/meminfo", "/proc/meminfo"),
        ("grep -f my-password flag", "my-password"),
        ("cat .netrc", ".netrc"),
        ("cat home/.ssh/config", "home/.ssh/config"),
        ("cat server.pem", "server.pem"),
    ):
        bed.fill()
        (bed.job / "home/.ssh").mkdir(parents=True)
        for file in ("my-password", ".netrc", "home/.ssh/config", "server.pem"):
            (bed.job / file).write_text("hunter2")
        found = bed.resolved(command)
        assert found.is_open
        assert found.unknown
        assert not [part for part in found.parts if part.name == f"input {name}"]


@pytest.mark.parametrize(
    "command", ["pip install -r requirements-tokens.txt", "cat tokenizer.json", "sh my-secret.sh"]
)
def test_a_file_that_only_sounds_like_a_secret_is_an_input(bed: _Bed, command: str) -> None:
    keys = set()
    for text in ("a==1\n", "a==2\n"):
        bed.fill()
        for file in ("requirements-tokens.txt", "tokenizer.json", "my-secret.sh"):
            (bed.job / file).write_text(text)
        keys.add(bed.resolved(command).parts)
    assert len(keys) == 2


def test_a_directory_that_an_unknown_program_is_told_of_is_not_read(bed: _Bed) -> None:
    """The directory may be a data set, or logs that each start writes to."""
    bed.fill()
    before = bed.resolved("mytool project")
    (bed.job / "project/log").touch()
    assert bed.resolved("mytool project") == before
    assert before.is_open


@pytest.mark.parametrize(
    "script",
    ["pip install 'a", "pip install $(a", "if true; then", "case a in", "((x=1))", "a\x01b", "fi"],
)
def test_a_script_that_is_not_understood_opens_the_key(bed: _Bed, script: str) -> None:
    bed.fill()
    assert bed.resolved(script).is_open


_PLACES = {
    "p/pyproject.toml": "[project]\nname = 'a'\n",
    "p/a.py": "a = 1\n",
    "w/a-1.0-py3-none-any.whl": "wheel",
    "a-1.0.tar.gz": "archive",
    "b.txt": "six==1.0\n",
    "with space.txt": "six==1.0\n",
    "b.zip": "archive",
}


def _parts(command: list[str], folder: Path, changed: str, text: str) -> tuple[object, object]:
    """Return the parts of a key before and after a file is changed."""
    for name, content in {**_PLACES, "requirements.txt": text}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content.replace("FOLDER", str(folder)))

    def found() -> object:
        environ = {"PATH": str(folder / "empty"), "HOME": str(folder), "PLACE": str(folder)}
        request = SetupRequest(
            command, targets=["/opt/made-by-nobody"], directory=str(folder), environ=environ
        )
        return resolve(request, lambda sentence: None).parts

    before = found()
    (folder / changed).write_text(_PLACES[changed] + "toml==1.0\n")
    return before, found()


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("p/", "p/a.py"),
        ("p/../p", "p/a.py"),
        ("-e p", "p/a.py"),
        ("-ep", "p/a.py"),
        ("-e p[dev]", "p/a.py"),
        ("--editable='p'", "p/a.py"),
        ("-e file:p#egg=a", "p/a.py"),
        ("file:./p", "p/a.py"),
        ("file:FOLDER/p", "p/a.py"),
        ("file://localhostFOLDER/p", "p/a.py"),
        ("a @ file:p", "p/a.py"),
        ("w/a-1.0-py3-none-any.whl --hash=sha256:00", "w/a-1.0-py3-none-any.whl"),
        ("a-1.0.tar.gz", "a-1.0.tar.gz"),
        ("a-1.0.tar.gz ; python_version > '3'", "a-1.0.tar.gz"),
        ('-r "with space.txt"', "with space.txt"),
        ("-r 'b.txt'", "b.txt"),
        ("-r file:b.txt", "b.txt"),
        ("-r file://FOLDER/b.txt", "b.txt"),
        ("--req b.txt", "b.txt"),
        ("--constraint 'b.txt'", "b.txt"),
        ("\ufeff-r b.txt", "b.txt"),
        ("--find-links 'w'", "w/a-1.0-py3-none-any.whl"),
        ("-f file:w", "w/a-1.0-py3-none-any.whl"),
    ],
)
def test_what_a_line_of_requirements_names_is_an_input(
    line: str, changed: str, tmp_path: Path
) -> None:
    """Regression: `-e PROJECT`, wheels without "./", quoted names and short file URLs were left
    out.

    A closed key then restored their old contents for ever.
    """
    command = ["pip", "install", "--no-index", "-r", "requirements.txt"]
    before, after = _parts(command, tmp_path, changed, f"{line}\n")
    assert before != after


@pytest.mark.parametrize(
    ("command", "changed"),
    [
        ("pip install --no-index file:p", "p/a.py"),
        ("pip install --no-index -e file:./p#egg=a", "p/a.py"),
        ("pip install --no-index file://$PWD/p", "p/a.py"),
        ("pip install --no-index file://$PLACE/p", "p/a.py"),
        ("pip install --no-index 'a @ file:p'", "p/a.py"),
        ("cd p; pip install --no-index file:../p", "p/a.py"),
        ("cd p; pip install --no-index file://$PWD", "p/a.py"),
        ("pip install --no-index -f file:w a==1.0", "w/a-1.0-py3-none-any.whl"),
        ("pip install --no-index -Uqrb.txt", "b.txt"),
        ("tar -xzfa-1.0.tar.gz", "a-1.0.tar.gz"),
        ("unzip b -d /opt/made-by-nobody", "b.zip"),
        ("cp -rt /opt/made-by-nobody p", "p/a.py"),
        ("cp -at /opt/made-by-nobody b.txt", "b.txt"),
        ("install -Dt /opt/made-by-nobody b.txt", "b.txt"),
        ("cp b.txt{,.bak}", "b.txt"),
    ],
)
def test_what_a_word_names_in_an_unusual_form_is_an_input(
    command: str, changed: str, tmp_path: Path
) -> None:
    before, after = _parts(["bash", "-c", command], tmp_path, changed, "")
    assert before != after


def test_a_script_that_sets_a_variable_very_often_is_read() -> None:
    """Regression: the time grew with the third power, to two minutes for such a script."""
    text = "\n".join(f"A=b{at}; cat $A" for at in range(2400))
    # The file that it reads is unknown, so the key is open.
    assert hints_of(["sh", "-c", text]).programs == ("cat",)
