"""Words of a set-up's command that a manifest may show: a closed list; others are hidden.

Everybody who reads the store reads its manifests. So no rule here says what a secret looks like: a
word is shown only if this module knows it. Shown are

- operators and keywords of the shell, redirections and the files behind them;
- programs of `_PROGRAMS`, wrappers such as `sudo`, and programs that are called by a path;
- names of the options of `_OPTION_NAMES` and of the tools in `_TOOLS`, and single letters;
- sub-commands, requirements, plain paths, versions and URLs behind the tools of `_TOOLS` (pip, uv,
  conda, apt-get, npm, git, mkdir, ...), where that sub-command and option take such words;
- names of variables that are set, and `$NAME` wherever it stands;
- URLs without user, query and those parts of the path that look like a token.

Every other word, comment and here-document is `***`. It is returned beside the text, since it
decides the result of the set-up: text and hidden words together tell two commands apart, but for
the users of URLs, which do not decide. A value of a variable whose name says that it is a secret is
hidden wherever it stands. Pure. Time grows in proportion to the length.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from bootseer.base.redact import HIDDEN, contains_secret, contains_token, strip_logins
from bootseer.linux.interpreters import PYTHON
from bootseer.snapshots.commands import PIP, WRAPPERS, Wrapper
from bootseer.snapshots.shell import SHELLS


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


class _Tool(NamedTuple):
    """Words of a program that are shown."""

    verbs: frozenset[str] = frozenset()
    takes: frozenset[str] = frozenset()
    """Verbs that precede requirements, paths and URLs; "": no verb is needed."""
    flags: frozenset[str] = frozenset()
    """Options without a value."""
    values: frozenset[str] = frozenset()
    """Options whose value is a requirement, path, version, number or URL."""
    runs: frozenset[str] = frozenset()
    """Verbs that precede another command."""


_NOTHING = _Tool()
_PIP = _Tool(
    _set("install download wheel uninstall list freeze check show cache config debug sync compile"),
    _set("install download wheel uninstall show sync compile"),
    _set(
        "-U --upgrade -q -qq -qqq --quiet -v -vv -vvv --verbose -y --yes --no-deps --no-cache-dir "
        "--pre --user --no-build-isolation --force-reinstall -I --ignore-installed "
        "--break-system-packages --require-hashes --no-index --prefer-binary --no-input "
        "--no-compile --compile --no-warn-script-location --disable-pip-version-check --system "
        "--dry-run --isolated --compile-bytecode --strict --exact --no-cache --no-sources "
        "--no-warn-conflicts --require-virtualenv --universal --generate-hashes --reinstall "
        "--native-tls --offline --no-config --no-progress"
    ),
    _set(
        "-r --requirement --requirements -c --constraint --constraints --build-constraint "
        "--override -e --editable -i --index-url --extra-index-url -f --find-links -t --target "
        "--prefix --root --src --platform --python-version --implementation --abi --no-binary "
        "--only-binary --timeout --retries --trusted-host --cache-dir --progress-bar --report "
        "--upgrade-strategy --python --root-user-action --hash --group --extra --exclude-newer "
        "--index-strategy --torch-backend --resolution --prerelease --link-mode -o --output-file "
        "--upgrade-package -P --reinstall-package --no-build-package --default-index --log --cert"
    ),
)
_UV = _Tool(
    _PIP.verbs
    | _set("pip sync add remove venv run tool python lock export self cache version init tree"),
    _PIP.takes | _set("add remove venv python"),
    _PIP.flags
    | _set(
        "--frozen --locked --all-extras --all-groups --no-dev --dev --only-dev --active --inexact "
        "--no-install-project --no-install-workspace --no-editable --seed --clear --allow-existing "
        "--managed-python --no-managed-python --all-packages --no-default-groups --no-project "
        "--system-site-packages --relocatable"
    ),
    _PIP.values
    | _set(
        "-p --project --directory --package --with --only-group --no-group --branch --rev --tag"
    ),
    _set("run"),
)
_CONDA = _Tool(
    _set("create install update upgrade remove uninstall env activate deactivate clean list info")
    | _set("run init config search shell"),
    _set("create install update upgrade remove uninstall activate search"),
    _set(
        "-y --yes -q --quiet -v --verbose --override-channels --no-deps --only-deps --force "
        "--freeze-installed --offline --update-deps --all --no-channel-priority --copy -a --prune "
        "--strict-channel-priority --use-local --no-capture-output --live-stream --tarballs "
        "--force-reinstall --force-remove --json --no-default-packages --no-pin --download-only"
    ),
    _set(
        "-n --name -p --prefix -f --file -c --channel --solver --platform --subdir --clone "
        "--experimental -r --root-prefix"
    ),
    _set("run"),
)
_APT = _Tool(
    _set("update install upgrade dist-upgrade remove purge autoremove clean autoclean add del get")
    | _set("makecache groupinstall reinstall check-update builddep build-dep"),
    _set("install remove purge add del reinstall groupinstall build-dep builddep"),
    _set(
        "-y --yes -q -qq --quiet --no-install-recommends --no-install-suggests --assume-yes "
        "--allow-downgrades --allow-unauthenticated --fix-missing --no-cache --purge --nodocs "
        "--reinstall -f --fix-broken --allow-change-held-packages --update --nogpgcheck"
    ),
    _set("-t --target-release --virtual --enablerepo --disablerepo"),
)
_NPM = _Tool(
    _set("install i ci add update uninstall remove run exec init build cache clean test config set")
    | _set("login publish"),
    _set("install i add update uninstall remove"),
    _set(
        "-g --global --save-dev -D --save --no-save --production --no-audit --no-fund --silent "
        "--frozen-lockfile --legacy-peer-deps --ignore-scripts --prefer-offline --force "
        "--no-optional"
    ),
    _set("--prefix --registry --omit --include --cache --cwd --dir"),
)
_POETRY = _Tool(
    _set("install sync add update remove lock run self env config publish build export"),
    _set("add update remove"),
    _set(
        "--no-root --no-dev --no-interaction -n --all-extras --all-groups --sync --no-cache "
        "--quiet -q --only-root --no-directory --compile --without-hashes --dev -G --prod "
        "--no-self --no-editable --frozen-lockfile --no-lock --check"
    ),
    _set("--with --without --only --extras -E --group -C --directory -P --project"),
    _set("run"),
)
_GIT = _Tool(
    _set("clone checkout switch pull fetch submodule update init lfs install reset restore apply"),
    _set("clone checkout switch pull fetch reset restore apply"),
    _set(
        "--recursive --recurse-submodules --shallow-submodules -q --quiet --single-branch --init "
        "--no-tags --bare --mirror --hard --force -f --all --tags --no-checkout --sparse --progress"
    ),
    _set("-b --branch --depth -j --jobs -C --filter --origin -o --reference"),
)
_VENV = _Tool(
    frozenset(),
    frozenset({""}),
    _set(
        "--system-site-packages --clear --upgrade --copies --symlinks --without-pip -q "
        "--no-download"
    )
    | _set("--upgrade-deps"),
    _set("-p --python --prompt"),
)
_PATHS = _Tool(
    takes=frozenset({""}),
    flags=_set(
        "-p -r -R -f -v -a -s -n -l -L -h -d -e -x -z -t -k -q -c -i -1 -rf -fr -sf -sfn -rfv -rv "
        "-xf -xzf -zxf -xvf -xzvf -zxvf -xjf -xJf -czf -cf -la -al -lh -pv --parents --recursive "
        "--force --verbose --extract --gzip --zstd --no-same-owner --symbolic "
        "--no-clobber --archive"
    ),
    values=_set("-C --directory --strip-components -m --mode --reference"),
)
# Options of unzip that take a password are in no list.
_UNZIP = _Tool(takes=frozenset({""}), flags=_set("-q -qq -o -n -l -j"), values=_set("-d"))
# Words of `test` beside "=" are compared, and may be anything.
_TEST = _Tool(flags=_set("-f -d -e -x -n -z -s -r -w -L -h -o -a -eq -ne -lt -le -gt -ge"))
_NUMBERS = _Tool(takes=frozenset({"#"}), flags=_set("-n -u -l -v -s -c -t"))
# Programs whose sub-commands are shown, and no word behind them.
_VERBS_ALONE = {
    **dict.fromkeys(("docker", "podman", "nerdctl"), "login pull push build run compose up"),
    **dict.fromkeys(("kubectl", "oc"), "create apply get secret generic docker-registry login"),
    **dict.fromkeys(("huggingface-cli", "hf"), "login download auth upload"),
    **dict.fromkeys(("openssl",), "enc dgst rsa x509 req s_client"),
    **dict.fromkeys(("svn", "hg"), "checkout co export update clone"),
    "helm": "install upgrade repo add update registry login pull",
    "aws": "configure set s3 cp sync ls ecr secretsmanager sts",
    "gcloud": "auth config set storage cp activate-service-account",
    "gsutil": "cp rsync ls",
    "wandb": "login artifact get init",
    "az": "login storage acr",
    "mc": "alias set cp mirror",
    "cargo": "install build fetch login",
    "twine": "upload check",
    "rclone": "copy sync config",
}
# Verbs whose options have logins.
_LOGIN_VERBS = _set("publish login upload auth")
_PYTHON_FLAGS = _set("-I -E -s -S -u -B -O -OO -b -bb -q -v -V --version -P -i")
_TOOLS: dict[str, _Tool] = {
    "pip": _PIP,
    "pip-sync": _PIP._replace(takes=frozenset({""})),
    "pip-compile": _PIP._replace(takes=frozenset({""})),
    "uv": _UV,
    **dict.fromkeys(("conda", "mamba", "micromamba"), _CONDA),
    **dict.fromkeys(("apt-get", "apt", "apk", "yum", "dnf", "microdnf", "zypper"), _APT),
    **dict.fromkeys(("npm", "yarn", "pnpm"), _NPM),
    **dict.fromkeys(("poetry", "pdm", "pixi"), _POETRY),
    "git": _GIT,
    **dict.fromkeys(("venv", "virtualenv"), _VENV),
    **dict.fromkeys(
        _set(
            "mkdir rmdir rm cp mv ln touch chmod cd pushd source . tar ls cat install du stat head "
            "tail wc dirname basename readlink realpath ldconfig gunzip gzip unzstd xz "
            "bunzip2 which"
        ),
        _PATHS,
    ),
    **{name: _Tool(_set(verbs)) for name, verbs in _VERBS_ALONE.items()},
    "unzip": _UNZIP,
    "make": _Tool(_set("all install clean build test check"), values=_set("-j -C -f --directory")),
    **dict.fromkeys(("test", "[", "[["), _TEST),
    **dict.fromkeys(("sleep", "ulimit", "umask", "exit", "return", "shift", "wait"), _NUMBERS),
}
_PROGRAMS = (
    frozenset(_TOOLS)
    | SHELLS
    | _set(
        "perl ruby node Rscript julia "
        "set unset export declare local readonly typeset trap true false : echo printf read eval "
        "popd hash type let pwd whoami id uname hostname date env sudo time nice nohup "
        "timeout exec "
        "command builtin xargs stdbuf setsid flock ionice ensurepip compileall setup.py for case "
        "select function in curl wget aria2c docker podman nerdctl buildah skopeo helm oras crane "
        "kubectl oc aws gcloud gsutil az azcopy mc rclone s3cmd s5cmd mysql mysqldump psql "
        "redis-cli mongo mongosh openssl svn hg lftp ftp smbclient htpasswd sshpass ssh scp sftp "
        "rsync ssh-keygen ssh-add gpg huggingface-cli hf wandb twine base64 tee grep "
        "sed awk tr cut "
        "sort uniq find jq yq make cmake ninja meson gcc g++ cc nvcc cargo rustup go java mvn "
        "gradle chown chgrp useradd groupadd usermod adduser su chpasswd passwd login git-lfs "
        "add-apt-repository apt-key apt-mark dpkg rpm update-alternatives locale-gen ldapsearch "
        "7z zip netrc vault op pass databricks mlflow dvc az kinit http https sqlcmd bcp pipx "
        "playwright jupyter nbconvert patch diff mktemp seq yes expect nproc free df mount umount"
    )
)
"""Programs that are called by their name alone."""

_OPTION_NAMES = (
    frozenset().union(*(tool.flags | tool.values for tool in _TOOLS.values()))
    | _PYTHON_FLAGS
    | _set(
        "--password --passwd --pass --passphrase --user --username --login --token --secret --key "
        "--api-key --apikey --auth --auth-token --access-token --access-key --secret-key "
        "--client-id --client-secret --credential --credentials --header --data --data-raw "
        "--data-binary --form --request --url --output --silent --show-error --fail --location "
        "--insecure --cookie --oauth2-bearer --proxy --proxy-user --http-user --http-password "
        "--from-literal --from-file --set --set-string --set-file --values --namespace --env "
        "--build-arg --secret-id --session-id --email --host --hostname --port --database --db "
        "--file --config --config-settings --global --local --location --add --unset --get "
        "--password-stdin --batch --decrypt --import --yes --no-tty --help --version --verbose "
        "--debug --quiet --dry-run --force --region --profile --endpoint-url --no-verify --relogin "
        "--keyring --recv-keys --key-url --sort --parallel --max-time --retry --create-dirs "
        "--no-check-certificate --post-data --compressed --json --method --body --input "
        "--extra-vars "
        "--global-option --config-setting --find --name --tag --push --pull --rm --volume --label"
    )
)
_CLUSTERS = re.compile(r"-(?:f?sSf?L|fsSL|sSL|sL|fsS|qO|qO-|nv|rn|bn|nb|n|y|it|ti|yq|yqq)")
_SHELL_FLAGS = re.compile(r"[-+][abefhilmnpruvxBCEHPT]*")
_KEYWORDS = _set("if then else elif fi do done while until esac { } ! time")
_SETS = _set("export declare local readonly typeset unset read")
# Variables whose values are no secrets; those of pip, uv and conda for an index are URLs.
_PLAIN_VARIABLES = re.compile(
    r"(?:PIP|UV|CONDA)_[A-Z_]*(?:URLS?|INDEX|INDEXES|CHANNELS|DIR|MODE|PYTHON|TARGET|PREFIX|LINKS)"
    r"|DEBIAN_FRONTEND|MAX_JOBS|TORCH_CUDA_ARCH_LIST|CUDA_HOME|CUDA_VISIBLE_DEVICES|LANG|LC_ALL"
    r"|PATH|LD_LIBRARY_PATH|PYTHONPATH|HOME|TMPDIR|CC|CXX|CMAKE_BUILD_PARALLEL_LEVEL|VIRTUAL_ENV"
    r"|CONDA_PREFIX|MAMBA_ROOT_PREFIX|HF_HOME|TORCH_HOME|XDG_[A-Z]+_HOME|OMP_NUM_THREADS"
)
_SWITCHES = _set("0 1 true false yes no on off True False")
_HEREDOC_ENDS = _set("E EOF EOT END EOS")
_REFERENCE = r"\$(?:\w+|\{\w+\}|[@*#?!$-])"
_REFERENCES = re.compile(rf"(?:{_REFERENCE})+")
_QUOTED_REFERENCE = re.compile(rf"\"({_REFERENCE})\"")
_PATH_TEXT = re.compile(r"[\w./+*?~-]*(?:\[[\w., -]*\])?")
_VERSION = r"(?:[~^]?v?\d[\w.*+!~-]*|latest|\*)"
_REQUIREMENT = re.compile(
    r"(?:@?[A-Za-z0-9][\w.-]*/)?(?:[A-Za-z0-9][\w.-]*::)?[A-Za-z0-9][\w.-]*(?:\[[\w., -]*\])?"
    rf"(?: ?(?:[=~!<>]?=?=|[<>@]) ?{_VERSION}(?:[,|=] ?[=~!<>]{{0,3}}[\w.*+!~-]+)*)?"
)
_PLAIN = re.compile(
    rf"[+-]?\d+(?:\.\d+)?[smhdkMG%]?|{_VERSION}|:all:|:none:|[ugoa]*[+-][rwxX]+"
    r"|[\w-]+=\d[\w.-]*"
)
# A commit, or a digest: long, and no secret.
_FIXED = re.compile(r"[0-9a-f]{40}|sha256:[0-9a-f]{64}")
_SCP = re.compile(r"git@[A-Za-z0-9.-]+:[\w./-]+")
_URL = re.compile(
    r"(?P<before>(?:[\w.-]+(?:\[[\w., -]*\])? ?@ ?)?(?:(?:git|hg|svn|bzr)\+)?"
    r"(?:https?|ssh|git|file|ftp|s3|gs|hdfs|oci)://[A-Za-z0-9.-]*(?::\d{1,5})?)"
    r"(?P<path>(?:/[^/?#@]*)*)(?P<ref>@[\w.-]+)?(?P<query>\?[^#@]*)?(?P<fragment>#[^@]*)?"
)
_FRAGMENT = re.compile(r"#(?:(?:egg|subdirectory)=[\w./-]+|sha256=[0-9a-f]{64})")
# Limit for a segment of a URL's path without dots; wheels have longer names, and dots.
_SEGMENT_MAX = 40
_SEGMENT = re.compile(r"[\w.+~-]*")
_RUN = re.compile(r"[A-Za-z0-9]{12,}")
_SWITCH = re.compile(r"(?<=\d)[A-Za-z]|(?<=[A-Za-z])\d")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w{0,63})\+?=")
_NAME = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
_PLAIN_NAME = re.compile(r"[A-Za-z_][\w.+-]{0,63}")
_MODULE = re.compile(r"[a-z_][\w.]{0,63}")
_CALLED_PATH = re.compile(rf"(?:\.{{0,2}}|~|{_REFERENCE})/.+")
_SCRIPT_NAME = re.compile(r"(?:.*/.+|.+\.(?:py|sh|bash))")
_REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|<>|>>|>\||[<>]&|[<>])|&>>?")
_OPERATOR = re.compile(r"&&|\|\||;;|\|&|[;&|()\n]")
_BLANKS = re.compile(r"(?:[ \t\r\f\v]|\\\n)+")
_ENDS = frozenset(" \t\r\n\f\v;|&<>()")
_ORDINARY = re.compile(r"[^\s;|&<>()\\'\"`$]+")
_SIGN = re.compile(r"\\.|\$\(|\$\{|[(){}\"'`]", re.DOTALL)
_ATOM = re.compile(r"[^\s'\"`;|&<>()=,\\]+")
_SIGNS_MAX = 2000
_DEPTH_MAX = 6


def shown_command(
    words: Sequence[str], known: Collection[str] = ()
) -> tuple[list[str], tuple[str, ...]]:
    """Return the words of a command as they may be shown, and the hidden texts in order.

    `known`: values of secrets. A command of one word with blanks in it is read as a script.
    """
    if len(words) == 1 and re.search(r"\s", words[0]):
        shown, hidden = shown_script(words[0], known)
        return [shown], hidden
    texts = [_Text(word) for word in words]
    whole = [_Word(text, 0, len(text.text), text.text) for text in texts]
    _Reader(known).command(whole, is_called=True)
    return [text.shown() for text in texts], tuple(one for text in texts for one in text.hidden())


def shown_script(text: str, known: Collection[str] = ()) -> tuple[str, tuple[str, ...]]:
    """Return the text of a script as it may be shown, and the hidden texts in order."""
    whole = _Text(text)
    _Reader(known).script(whole, 0, len(text))
    return whole.shown(), whole.hidden()


def shown_values(text: str, known: Collection[str] = ()) -> tuple[str, tuple[str, ...]]:
    """Return the value of an option as it may be shown, and the hidden texts in order.

    The value holds requirements, paths, versions and URLs, separated by blanks or commas.
    """
    # Logins are removed first, since a password may contain a comma.
    whole = _Text(strip_logins(text))
    reader = _Reader(known)
    for match in re.finditer(r"[^\s,]+", whole.text):
        reader.argument(whole, match.start(), match.end())
    return whole.shown(), whole.hidden()


def hidden_atoms(shown: Iterable[str], hidden: Iterable[str]) -> frozenset[str]:
    """Return the pieces of hidden words that sentences about the command must not contain."""
    seen = {atom for text in shown for atom in _ATOM.findall(text)}
    return frozenset(atom for text in hidden for atom in (text, *_ATOM.findall(text))) - seen


def hide_atoms(
    text: str, hidden: Collection[str], keeps: Callable[[str], bool] = lambda word: False
) -> str:
    """Return a sentence in which the words and pieces of `hidden_atoms` are hidden.

    Pieces for which `keeps` returns true stay.
    """

    def shown(piece: str) -> str:
        return HIDDEN if piece in hidden and not keeps(piece) else piece

    words = [_ATOM.sub(lambda match: shown(match[0]), shown(word)) for word in text.split(" ")]
    return " ".join(words)


def is_known_program(word: str) -> bool:
    """Return whether `word` is a program that is shown wherever it is called."""
    name = word.rpartition("/")[2]
    is_listed = name in _PROGRAMS or bool(PYTHON.fullmatch(name) or PIP.fullmatch(name))
    return (is_listed and name == word) or (
        bool(_CALLED_PATH.fullmatch(word) or (is_listed and "/" in word)) and _is_path(word)
    )


class _Text:
    """Text with replacements for parts of it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._edits: list[tuple[int, int, str, tuple[str, ...]]] = []

    def hide(self, begin: int, end: int) -> None:
        if begin < end:
            self._edits.append((begin, end, HIDDEN, (self.text[begin:end],)))

    def replace(self, begin: int, end: int, new: str, hidden: tuple[str, ...]) -> None:
        self._edits.append((begin, end, new, hidden))

    def shown(self) -> str:
        kept: list[str] = []
        done = 0
        for begin, end, new, _ in sorted(self._edits):
            kept += [self.text[done:begin], new]
            done = end
        return "".join([*kept, self.text[done:]])

    def hidden(self) -> tuple[str, ...]:
        return tuple(one for edit in sorted(self._edits) for one in edit[3])


class _Word(NamedTuple):
    """Word of a command; `value` is None if quotes and escapes are too complex to resolve."""

    of: _Text
    begin: int
    end: int
    value: str | None


def _is_path(value: str) -> bool:
    return bool(_PATH_TEXT.fullmatch(re.sub(_REFERENCE, "", value)))


def _looks_random(text: str) -> bool:
    """Return whether a part of a path or name may be a token.

    Tokens have a known form, are UUIDs, or alternate between letters and digits.
    """
    if contains_token(text) or _UUID.search(text):
        return True
    for match in _RUN.finditer(text):
        run = match[0]
        has_digit = any(letter.isdigit() for letter in run)
        if len(_SWITCH.findall(run)) > 2 or (len(run) >= 20 and has_digit) or len(run) >= 32:
            return True
    return False


class _Reader:
    """Reader of commands, which hides all words that may not be shown in their texts."""

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self._depth = 0

    def script(self, of: _Text, begin: int, end: int) -> None:
        if self._depth == _DEPTH_MAX:
            of.hide(begin, end)
            return
        self._depth += 1
        text = of.text
        words: list[_Word] = []
        heredocs: list[str] = []
        redirection = ""
        at = begin
        while at < end:
            if blanks := _BLANKS.match(text, at, end):
                at = blanks.end()
                continue
            if text[at] == "#" and (at == begin or text[at - 1] in _ENDS):
                line_end = text.find("\n", at, end)
                of.hide(at, line_end if line_end >= 0 else end)
                at = line_end if line_end >= 0 else end
                continue
            if found := _REDIRECTION.match(text, at, end):
                redirection, at = found[0].lstrip("0123456789"), found.end()
                continue
            if operator := _OPERATOR.match(text, at, end):
                self.command(words)
                words, redirection, at = [], "", operator.end()
                if operator[0] == "\n":
                    for ending in heredocs:
                        at = self._skip_heredoc(of, at, end, ending)
                    heredocs = []
                continue
            word_end = _word_end(text, at, end)
            if word_end < 0:
                of.hide(at, end)
                break
            word = _word(of, at, word_end)
            at = word_end
            if not redirection:
                words.append(word)
            elif redirection.startswith("<<") and redirection != "<<<":
                heredocs.append(re.sub(r"[\\'\"]", "", text[word.begin : word.end]))
                if word.value not in _HEREDOC_ENDS:
                    of.hide(word.begin, word.end)
            elif redirection == "<<<":
                self._other(word)
            else:
                self.argument(of, word.begin, word.end)
            redirection = ""
        self.command(words)
        self._depth -= 1

    def _skip_heredoc(self, of: _Text, at: int, end: int, ending: str) -> int:
        """Hide the lines up to the line `ending`; return the position of that line."""
        begin = at
        while at < end:
            line_end = of.text.find("\n", at, end)
            line_end = line_end if line_end >= 0 else end
            if of.text[at:line_end].lstrip("\t") == ending:
                of.hide(begin, at)
                if ending not in _HEREDOC_ENDS:
                    of.hide(at, line_end)
                return line_end
            at = line_end + 1
        of.hide(begin, end)
        return end

    def command(self, words: Sequence[_Word], *, is_called: bool = False) -> None:
        """Read one simple command. `is_called`: the first word is certainly a program."""
        at = 0
        while at < len(words):
            value = words[at].value
            if self._assign(words[at]) or value in _KEYWORDS:
                at += 1
            elif value in WRAPPERS:
                at = self._skip_wrapper(words, at + 1, WRAPPERS[value])
            else:
                break
        if at >= len(words):
            return
        self._program(words[at], is_called=is_called and at == 0)
        name = (words[at].value or "").rpartition("/")[2]
        rest = words[at + 1 :]
        if name in SHELLS:
            self._shell(rest)
        elif PYTHON.fullmatch(name):
            self._python(rest)
        elif name == "set":
            for word in rest:
                if word.value != "pipefail" and not _is_shell_flag(word):
                    self._other(word)
        elif name in _SETS:
            for word in rest:
                is_named = _NAME.fullmatch(word.value or "") and not self._is_known(word.value)
                if not (self._assign(word) or (is_named and not _looks_random(word.value or ""))):
                    self._option_or_other(word)
        else:
            self._tool("pip" if PIP.fullmatch(name) else name, rest)

    def _program(self, word: _Word, *, is_called: bool) -> None:
        value = word.value
        if value is not None and not self._is_known(value) and not _looks_random(value):
            if is_known_program(value) or value in ("]", "]]", "in"):
                return
            if is_called and (_PLAIN_NAME.fullmatch(value) or _is_path(value)):
                return
        self._other(word)

    def _skip_wrapper(self, words: Sequence[_Word], at: int, wrapper: Wrapper) -> int:
        own_count = wrapper.own_count
        while at < len(words):
            word = words[at]
            value = word.value or ""
            if value in wrapper.values:
                if at + 1 < len(words):
                    at += 1
                    self._number_or_other(words[at])
            elif value.startswith("-"):
                # Values of single letters may be letters of others: the user of `sudo -uhugh`.
                names = {name for name in wrapper.values if name.startswith("--")}
                self._option(word, _Tool(flags=frozenset(names)))
            elif own_count:
                own_count -= 1
                self._number_or_other(word)
            else:
                break
            at += 1
        return at

    def _assign(self, word: _Word) -> bool:
        """Read NAME=VALUE; False where it is none."""
        text = word.of.text
        match = _ASSIGNED.match(text, word.begin, word.end)
        if match is None:
            return False
        if _looks_random(match["name"]) or self._is_known(match["name"]):
            word.of.hide(word.begin, word.end)
        elif _PLAIN_VARIABLES.fullmatch(match["name"]):
            self._listed(word.of, match.end(), word.end)
        elif text[match.end() : word.end].strip("'\"") not in _SWITCHES:
            self._value(word.of, match.end(), word.end)
        return True

    def _listed(self, of: _Text, begin: int, end: int) -> None:
        """Read a value of paths or URLs with ":" or blanks between them."""
        inner_begin, inner_end = _inside(of.text, begin, end)
        value = of.text[inner_begin:inner_end]
        is_list = not re.search(r"://|[\\'\"`]|\$\(", value)
        if not is_list or not re.search(r"[: ,;]", value):
            self.argument(of, begin, end)
            return
        for match in re.finditer(r"[^: ,;]+", value):
            self.argument(of, inner_begin + match.start(), inner_begin + match.end())

    def _shell(self, words: Sequence[_Word]) -> None:
        at = 0
        is_script = False
        while at < len(words):
            value = words[at].value or ""
            if value == "--login" or _is_shell_flag(words[at]):
                pass
            elif re.fullmatch(r"-[abefhilmnpruvxBCEHPT]*c[abefhilmnpruvxBCEHPT]*", value):
                is_script = True
            elif re.fullmatch(r"[-+][a-zA-Z]*[oO]", value) and at + 1 < len(words):
                at += 1
                if words[at].value not in ("pipefail", "errexit", "nounset", "xtrace"):
                    self._other(words[at])
            else:
                break
            at += 1
        rest = words[at:]
        if not rest:
            return
        first = rest[0]
        if is_script:
            begin, end = _inside(first.of.text, first.begin, first.end)
            is_whole = first.value is not None or first.of.text[first.begin : first.end][:1] == '"'
            if is_whole or (begin, end) != (first.begin, first.end):
                self.script(first.of, begin, end)
            else:
                first.of.hide(first.begin, first.end)
        else:
            self._script_name(first)
        for word in rest[1:]:
            self._option_or_other(word)

    def _python(self, words: Sequence[_Word]) -> None:
        for at, word in enumerate(words):
            if word.value in _PYTHON_FLAGS:
                continue
            if word.value == "-m" and at + 1 < len(words):
                module = words[at + 1].value or ""
                is_tool = module in ("pip", "venv", "virtualenv", "ensurepip", "uv", "conda")
                if not is_tool and (
                    not _MODULE.fullmatch(module) or _looks_random(module) or self._is_known(module)
                ):
                    self._other(words[at + 1])
                self._tool(module if is_tool else "", words[at + 2 :])
                return
            if (word.value or "").startswith("-"):
                self._tool("", words[at:])
            else:
                self._script_name(word)
                self._tool("", words[at + 1 :])
            return

    def _script_name(self, word: _Word) -> None:
        if _SCRIPT_NAME.fullmatch(word.value or ""):
            self.argument(word.of, word.begin, word.end)
        else:
            self._option_or_other(word)

    def _tool(self, name: str, words: Sequence[_Word]) -> None:
        tool = _TOOLS.get(name, _NOTHING)
        if any(word.value in _LOGIN_VERBS for word in words):
            # There, -u and -p are a user and a password; elsewhere, a Python or a package.
            tool = tool._replace(values=frozenset())
        verbs: set[str] = set()
        is_value = is_shown_value = is_behind_verbs = False
        for at, word in enumerate(words):
            raw = word.value if word.value is not None else word.of.text[word.begin : word.end]
            if is_shown_value:
                is_shown_value = False
                self.argument(word.of, word.begin, word.end)
            elif raw.startswith("-") and raw != "-":
                is_shown_value, is_value = self._option(word, tool)
            elif is_value:
                is_value = False
                self._other(word)
            elif not is_behind_verbs and raw in tool.verbs:
                verbs.add(raw)
            elif tool.runs & verbs:
                self.command(words[at:])
                return
            else:
                is_behind_verbs = True
                if tool.takes & (verbs or {""}):
                    self.argument(word.of, word.begin, word.end)
                elif "#" in tool.takes:
                    self._number_or_other(word)
                elif raw not in ("]", "]]", "=", "==", "!=", "!", "-"):
                    self._other(word)

    def _option_or_other(self, word: _Word) -> None:
        if (word.value or "").startswith("-"):
            self._option(word, _NOTHING)
        else:
            self._other(word)

    def _option(self, word: _Word, tool: _Tool) -> tuple[bool, bool]:
        """Read an option; return two facts about the next word.

        They are whether it is the option's value and may be shown, and whether it may be the value
        at all.
        """
        of = word.of
        begin, end = _inside(of.text, word.begin, word.end)
        raw = of.text[begin:end]
        name, equals, _ = raw.partition("=")
        if raw in ("-", "--"):
            return False, False
        if raw in tool.flags:
            return False, False
        if raw in tool.values:
            return True, False
        if name.startswith("--"):
            if name not in tool.flags | tool.values | _OPTION_NAMES:
                of.hide(word.begin, word.end)
            elif equals and name in tool.values:
                self.argument(of, begin + len(name) + 1, end)
            elif equals:
                self._value(of, begin + len(name) + 1, end)
            return False, not equals
        if raw[:2] in tool.values:
            self.argument(of, begin + 2 + (raw[2:3] == "="), end)
            return False, False
        if all(f"-{letter}" in tool.flags for letter in raw[1:]) or _CLUSTERS.fullmatch(raw):
            return False, False
        if not re.fullmatch(r"-[A-Za-z]", raw):
            of.hide(word.begin, word.end)
        return False, True

    def argument(self, of: _Text, begin: int, end: int) -> None:
        """Show a requirement, path, number or URL; hide anything else."""
        begin, end = _inside(of.text, begin, end)
        value = _QUOTED_REFERENCE.sub(r"\1", of.text[begin:end])
        if (
            HIDDEN not in value
            and not self._is_known(value)
            and (
                _FIXED.fullmatch(value)
                or (
                    (
                        _PLAIN.fullmatch(value)
                        or _SCP.fullmatch(value)
                        or _is_path(value)
                        or _REQUIREMENT.fullmatch(value)
                    )
                    and not any(_looks_random(part) for part in re.split(r"[/=@:]", value))
                )
            )
        ):
            return
        self._value(of, begin, end)

    def _number_or_other(self, word: _Word) -> None:
        if not re.fullmatch(r"-?\d{1,7}[smhd]?|unlimited", word.value or ""):
            self._other(word)

    def _other(self, word: _Word) -> None:
        self._value(word.of, word.begin, word.end)

    def _value(self, of: _Text, begin: int, end: int) -> None:
        """Show `$NAME`, URLs and the commands of `$(...)` without secrets; hide everything else."""
        outer = begin, end
        begin, end = _inside(of.text, begin, end)
        value = of.text[begin:end]
        if not value or _REFERENCES.fullmatch(value):
            return
        if value.startswith("$(") and _closed(of.text, begin + 2, end, ")") == end:
            self.script(of, begin + 2, end - 1)
        elif value[0] == "`" and _closed(of.text, begin + 1, end, "`") == end:
            self.script(of, begin + 1, end - 1)
        elif "://" in value and not self._is_known(strip_logins(value)):
            self._url(of, begin, end)
        else:
            of.hide(*outer)

    def _url(self, of: _Text, begin: int, end: int) -> None:
        url = strip_logins(of.text[begin:end])
        match = _URL.fullmatch(url)
        is_versioned = match is not None and bool(
            re.search(r"(?:git|hg|svn|bzr)\+", match["before"])
        )
        # Only in a URL of a version control system does "@" behind a path begin a version. In other
        # URLs the text before the "@" may be a login that contains a "/".
        if (
            match is None
            or (match["ref"] and not is_versioned)
            or _looks_random(match["before"].rpartition("//")[2])
        ):
            of.hide(begin, end)
            return
        hidden: list[str] = []
        shown = [match["before"]]
        before = ""
        for segment in match["path"].split("/")[1:]:
            # Behind "/t/" conda has its tokens.
            is_long = len(segment) > _SEGMENT_MAX and "." not in segment
            is_shown = (
                _SEGMENT.fullmatch(segment)
                and before != "t"
                and not is_long
                and not _looks_random(segment)
            )
            shown += ["/", segment if is_shown else HIDDEN]
            hidden += [] if is_shown else [segment]
            before = segment
        reference = match["ref"] or ""
        fragment = match["fragment"] or ""
        is_random_fragment = not fragment.startswith("#sha256=") and _looks_random(fragment)
        is_version = _COMMIT.fullmatch(reference[1:]) or not _looks_random(reference)
        for text, is_told in (
            (reference, bool(is_version)),
            (match["query"] or "", False),
            (fragment, bool(_FRAGMENT.fullmatch(fragment)) and not is_random_fragment),
        ):
            shown.append(text if is_told else text[:1] + HIDDEN if text else "")
            hidden += [] if is_told or not text else [text]
        new = "".join(shown)
        if new != of.text[begin:end]:
            of.replace(begin, end, new, tuple(hidden))

    def _is_known(self, value: str | None) -> bool:
        return value is not None and contains_secret(value, self._known)


def _is_shell_flag(word: _Word) -> bool:
    value = word.value or ""
    return bool(_SHELL_FLAGS.fullmatch(value.removesuffix("o"))) and len(value) > 1


def _word(of: _Text, begin: int, end: int) -> _Word:
    inner_begin, inner_end = _inside(of.text, begin, end)
    value = _QUOTED_REFERENCE.sub(r"\1", of.text[inner_begin:inner_end])
    return _Word(of, begin, end, None if re.search(r"[\\'\"`]", value) else value)


def _inside(text: str, begin: int, end: int) -> tuple[int, int]:
    """Return the place without the quotes around it, where one pair holds all of it."""
    if end - begin >= 2 and text[begin] in "'\"" and _piece_end(text, begin, end) == end:
        return begin + 1, end - 1
    return begin, end


def _word_end(text: str, at: int, end: int) -> int:
    """Return the end of the shell's word at `at`; -1 if a quote in it is never closed."""
    while at < end and text[at] not in _ENDS:
        if ordinary := _ORDINARY.match(text, at, end):
            at = ordinary.end()
        else:
            at = _piece_end(text, at, end)
            if at < 0:
                return -1
    return at


def _piece_end(text: str, at: int, end: int) -> int:
    sign = text[at]
    if sign == "\\":
        return min(at + 2, end)
    if sign == "'":
        return text.find("'", at + 1, end) + 1 or -1
    if sign in '"`':
        return _closed(text, at + 1, end, sign)
    if text.startswith("$(", at, end):
        return _closed(text, at + 2, end, ")")
    if text.startswith("${", at, end):
        return _closed(text, at + 2, end, "}")
    return at + 1


def _closed(text: str, at: int, end: int, closing: str) -> int:
    """Return the end behind `closing`, with inner quotes and brackets closed first.

    Returns -1 if it is never closed, or beyond more signs than a command has.
    """
    expected = [closing]
    for count, match in enumerate(_SIGN.finditer(text, at, end)):
        if count == _SIGNS_MAX:
            return -1
        sign = match[0]
        if sign == expected[-1]:
            expected.pop()
            if not expected:
                return match.end()
        elif expected[-1] == "'":
            continue
        elif sign in ("$(", "${"):
            expected.append(")" if sign == "$(" else "}")
        elif expected[-1] in ")}" and sign in "(\"'`":
            expected.append(")" if sign == "(" else sign)
    return -1
