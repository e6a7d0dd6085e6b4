"""Programs and modules that cannot be preloaded: one line names them, and the program runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.served.preload.record import digests_of
from tests.bootseer.served.preload.conftest import PreloadingNode

OFFENDERS = {
    "starts a thread": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "opens /dev/zero": "device = open('/dev/zero', 'rb')",
    "opens socket:": "import socket\nkept = socket.socket()",
    "reads its process id": "import os\npid = os.getpid()",
    "reads the program's arguments": "import sys\nname = sys.argv[0]",
    "reads all variables": "import os\nkept = dict(os.environ)",
    "draws random bytes": "import os\nidentity = os.urandom(4)",
    "changes the signal handlers": "import signal\nsignal.signal(signal.SIGUSR1, signal.SIG_IGN)",
    "its child processes": "import subprocess\n"
    "child = subprocess.Popen(['sleep', '9'], stdout=-3, stderr=-3)",
    "changes the working directory": "import os\nos.chdir('/')",
    "cannot be imported": "raise RuntimeError('not today')",
}
# It continues without the modules that it cannot import, and reports those it has.
PROGRAM = """
import sys
import good
before = sys.modules.get("bad.inner")
try:
    import bad.inner
except RuntimeError:
    pass
print(good.__name__, before, "bad" in sys.modules)
"""


def _program(node: PreloadingNode, text: str = PROGRAM) -> None:
    node.write("modules/good.py", "")
    node.write("modules/bad/__init__.py", "")
    node.write("program.py", text)


@pytest.mark.parametrize("fault", OFFENDERS)
def test_an_import_that_cannot_be_shared_is_named_and_left_to_the_program(
    node: PreloadingNode, fault: str
) -> None:
    _program(node)
    node.write("modules/bad/inner.py", OFFENDERS[fault])
    node.begin("good", "bad", "bad.inner")
    done = node.run()
    assert (done.stdout, done.returncode) == ("good None True\n", 0), done.stderr
    assert done.stderr == "", "what is left is preloaded"
    assert node.log().startswith("not preloaded: bad.inner ")
    assert fault in node.log()
    # The next preloader of the job knows it from the start.
    known = json.loads((node.folder / "cache/preload/j.refused.json").read_text())
    assert fault in known["bad.inner"]


def test_whoever_imports_such_a_module_is_not_preloaded_either(node: PreloadingNode) -> None:
    _program(node, "import sys, good, user; print(user.inner.pid == __import__('os').getpid())")
    node.write("modules/bad/inner.py", "import os\npid = os.getpid()")
    node.write(
        "modules/user.py", "try:\n    import bad.inner as inner\nexcept Exception:\n    pass"
    )
    node.begin("good", "user", "bad", "bad.inner")
    done = node.run()
    assert (done.stdout, done.stderr) == ("True\n", "")


def _one_line(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the reason why the program, which prints "ran", started without the preloader."""
    assert (done.stdout, done.returncode) == ("ran\n", 0), done.stderr
    head, _, reason = done.stderr.partition("started without the preloader: ")
    assert (head, done.stderr.count("\n")) == ("bootseer: ", 1), done.stderr
    return reason.rstrip("\n")


@pytest.fixture
def ready(node: PreloadingNode) -> PreloadingNode:
    node.write("modules/good.py", "import os\nVALUE = os.environ.get('LIMIT')")
    node.write("program.py", "import good; print('ran')")
    node.begin("good")
    assert node.run().stderr == ""
    return node


def test_a_variable_that_differs_is_named(ready: PreloadingNode) -> None:
    assert "LIMIT differs, which was read by" in _one_line(ready.run(env={"LIMIT": "1"}))
    assert "OMP_NUM_THREADS differs" in _one_line(ready.run(env={"OMP_NUM_THREADS": "2"}))
    assert "OTHER differs" in _one_line(ready.run(env={"OTHER": "1"}))
    assert ready.run(env={"RANK": "3", "TORCHELASTIC_RUN_ID": "x"}).stderr == ""


def test_a_variable_that_varies_between_starts_may_differ_where_no_import_reads_it(
    node: PreloadingNode,
) -> None:
    node.write("modules/good.py", "import os\nVALUE = os.environ.get('LIMIT')")
    node.write("program.py", "import os, good; print(os.environ['RUN_ID'])")
    node.begin("good", varying=("RUN_ID", "LIMIT", "OMP_PLACES"), extra={"RUN_ID": "1"})
    done = node.run(env={"RUN_ID": "2"})
    assert (done.stdout, done.stderr) == ("2\n", "")
    for name in ("LIMIT", "OMP_PLACES"):
        assert f"{name} differs" in node.run(env={"RUN_ID": "2", name: "1"}).stderr


def test_a_changed_module_is_not_served_stale(ready: PreloadingNode) -> None:
    path = ready.write("modules/good.py", "print('new')\nVALUE = 2")
    done = ready.run()
    assert done.stdout == "new\nran\n"
    assert f"{path} was changed since" in done.stderr


def test_another_program_or_interpreter_option_starts_ordinarily(ready: PreloadingNode) -> None:
    ready.write("other.py", "print('ran')")
    assert "another program" in _one_line(ready.run("-u", "other.py"))
    for words in (["-X", "dev"], ["-W", "error"], ["-O"]):
        assert "another program" in _one_line(ready.run(*words, "-u", "program.py"))


def test_a_terminal_or_the_session_of_others_starts_ordinarily(ready: PreloadingNode) -> None:
    assert "leader of a session" in _one_line(ready.run(start_new_session=False))


@pytest.mark.parametrize(
    ("sitecustomize", "reason"),
    [
        ("import sys; sys.settrace(lambda *_: None)", "a debugger or a profiler"),
        ("import coverage_of_ours", "the interpreter itself loads coverage_of_ours"),
        ("import os; os.environ.get('RANK')", "the variable RANK differs, which was read"),
    ],
)
def test_what_the_interpreter_itself_loads_is_respected(
    node: PreloadingNode, sitecustomize: str, reason: str
) -> None:
    node.write("modules/sitecustomize.py", sitecustomize)
    node.write("modules/coverage_of_ours.py", "")
    node.write("modules/good.py", "")
    node.write("program.py", "import good; print('ran')")
    node.begin("good")
    assert reason in _one_line(node.run(env={"RANK": "1"}))


def test_a_module_that_the_program_has_put_there_is_taken(node: PreloadingNode) -> None:
    node.write("modules/good/__init__.py", "VALUE = 1")
    node.write("modules/good/part.py", "")
    node.write(
        "program.py",
        "import sys, types; fake = types.ModuleType('good'); fake.__path__ = ['modules/good']\n"
        "sys.modules['good'] = fake; import good.part\n"
        "print(good is fake, sys.modules['good'] is fake)",
    )
    node.begin("good.part")
    done = node.run()
    assert done.stdout == "True True\n"


def test_threads_that_import_at_once_find_whole_modules(node: PreloadingNode) -> None:
    names = [f"good{number}" for number in range(40)]
    for name in names:
        node.write(f"modules/{name}.py", "VALUE = 1")
    node.write(
        "program.py",
        "import importlib, threading\nfound = []\n"
        f"def work():\n    for name in {names}[::-1]:\n"
        "        found.append(importlib.import_module(name).VALUE)\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "[one.start() for one in threads]; [one.join() for one in threads]\n"
        "print(sum(found))",
    )
    node.begin("threading", *names)
    done = node.run()
    assert (done.stdout, done.stderr) == ("320\n", "")


def test_closed_files_start_ordinarily(ready: PreloadingNode) -> None:
    command = f"exec {ready.run_folder}/python -u program.py <&-"
    done = subprocess.run(
        ["sh", "-c", command],
        env={**ready.environ, "BOOTSEER_PRELOAD_PYTHON": sys.executable},
        cwd=ready.folder,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=60,
    )
    assert "a standard file is closed" in _one_line(done)


@pytest.mark.needs("root")
def test_another_user_cannot_reach_it(ready: PreloadingNode) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import os; os.setuid(65534); os.listdir({str(ready.run_folder)!r})",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "PermissionError" in done.stderr
    assert ready.run_folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.needs("root")
def test_other_rights_start_ordinarily(ready: PreloadingNode) -> None:
    assert "rights differs" in _one_line(ready.run(extra_groups=[1]))


def test_a_variable_that_the_program_sets_itself_is_respected(node: PreloadingNode) -> None:
    """An earlier import would have read the variable before the program sets it."""
    node.write("modules/good.py", "import os\nVALUE = os.environ.get('HF_HOME')")
    node.write(
        "program.py", "import os; os.environ['HF_HOME'] = 'mine'; import good; print(good.VALUE)"
    )
    node.begin("good")
    done = node.run()
    assert done.stdout == "mine\n"
    assert (
        done.stderr == "bootseer: started again without the preloader: the program sets HF_HOME\n"
    )
    # The next preloader knows, also if the record says it.
    node.end()
    node.begin("good")
    assert node.run().stdout == "mine\n"
    assert "good reads HF_HOME, which the program sets itself" in node.log()
    (node.folder / "cache/preload/j.refused.json").unlink()
    node.end()
    node.begin("good", changed=digests_of({"HF_HOME": "mine"}, "salt"))
    done = node.run()
    assert (done.stdout, done.stderr) == ("mine\n", "")


def test_what_the_imports_set_is_no_variable_of_the_program(node: PreloadingNode) -> None:
    node.write("modules/good.py", "import os\nos.environ.setdefault('CACHE', 'theirs')")
    node.write("program.py", "import os, sys, good; print(os.environ['CACHE'], good)")
    node.begin("good", changed=digests_of({"CACHE": "theirs"}, "salt"))
    assert node.run().stderr == ""
    assert node.log() == ""


def test_a_module_of_the_programs_own_is_taken(node: PreloadingNode) -> None:
    node.write("modules/good.py", "VALUE = 'installed'")
    node.write(
        "program.py", "import sys; sys.path.insert(0, 'own'); import good; print(good.VALUE)"
    )
    node.write("own/good.py", "VALUE = 'own'")
    node.begin("good")
    done = node.run()
    assert done.stdout == "own\n"
    assert "the program has a good of its own" in done.stderr


def test_memory_has_a_limit(node: PreloadingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write("modules/good.py", "kept = b'x' * (300 << 20)")
    node.write("program.py", "print('ran')")
    node.begin("good", launcher={"BOOTSEER_PRELOAD_LIMIT": str(200 << 20)})
    assert "more than 200 MiB" in _one_line(node.run())


def test_a_start_in_an_image_says_that_it_has_no_preloader(tmp_path: Path) -> None:
    """A start that records imports says so, too."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bootseer",
            "run",
            "--preload",
            "--set",
            "trace_python=off",
            "--",
            "echo",
            "ran",
        ],
        env={
            **os.environ,
            "BOOTSEER_RUN_DIR": str(tmp_path),
            "BOOTSEER_CACHE_DIR": str(tmp_path),
            "BOOTSEER_TIMELINE_DIR": str(tmp_path),
            "BOOTSEER_STORE": str(tmp_path / "s"),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "ran\n"
    assert "workers start without a preloader: --preload needs" in done.stderr


def test_what_the_c_library_does_for_a_first_thread_is_no_change_of_signals(
    node: PreloadingNode,
) -> None:
    """A library of linear algebra begins threads in its import, and ends them before forks."""
    node.write(
        "modules/heavy.py",
        "import os, threading\none = threading.Thread(target=int)\none.start()\none.join()\n"
        "caught = open('/proc/self/status').read().split('SigCgt:')[1].split()[0]",
    )
    node.write("program.py", "import heavy, sys; print(heavy.caught != '2', heavy.os.getppid())")
    node.begin("heavy")
    done = node.run()
    assert (done.stdout.split()[0], done.stderr, node.log()) == ("True", "", "")


def test_all_that_lead_to_a_refused_module_are_found_at_once(node: PreloadingNode) -> None:
    """Each attempt imports everything anew, so twenty attempts take a minute."""
    node.write("modules/lists.py", "import os\nfor name in os.environ: pass\nimport good")
    names = [f"leads{number}" for number in range(8)]
    for number, name in enumerate(names):
        node.write(f"modules/{name}.py", f"import {names[number - 1] if number % 2 else 'lists'}")
    _program(node, "import good, " + ", ".join(names) + "; print('ran')")
    node.begin("good", *reversed(names), "lists")
    assert (node.run().stdout, node.run().stderr) == ("ran\n", "")
    lines = node.log().splitlines()
    assert [line.split()[2] for line in lines] == ["lists", "lists"], lines
    known = json.loads((node.folder / "cache/preload/j.refused.json").read_text())
    assert known.pop("lists").startswith("lists reads all variables")
    assert known == dict.fromkeys(names, "")


@pytest.mark.needs(modules=["setuptools"])
def test_a_module_that_a_finder_puts_in_the_place_of_another_is_given(node: PreloadingNode) -> None:
    """setuptools has a distutils of its own, regardless of `sys.path`."""
    node.write("program.py", "import setuptools, distutils; print(distutils.__file__)")
    node.begin("setuptools", "distutils")
    done = node.run()
    assert (done.stdout, done.stderr) == (node.run(ordinarily=True).stdout, "")
