"""Which words of set-ups are secrets: by names, by programs' short options, by settings."""

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.base import redact, redact_words
from bootseer.base.redact import take_command_secrets, take_secrets
from bootseer.snapshots.setup.fingerprint import command_part, fingerprint, secret_part

SECRET = "c0nf1dent1al"
COMMANDS = [
    "wandb login {}",
    "aws configure set aws_secret_access_key {}",
    "aws configure set aws_access_key_id {}",
    "npm config set //registry.npmjs.org/:_authToken {}",
    "npm config set --location=user _auth {}",
    "conda config --set my_token {}",
    "git config --global tool.token {}",
    "mc alias set store https://host me {}",
    "mc alias set store https://host {} {}",
    "curl --oauth2-bearer {} https://host",
    "curl -sSu me:{} https://host",
    "curl -sSfume:{} https://host",
    "curl -u $USER:{} https://host",
    "curl -HX-Token:{} https://host",
    "curl -HAuthorization:{} https://host",
    "curl -b session={} https://host",
    "curl -sbsid={} https://host",
    "curl --cookie {} https://host",
    "mysql -uroot -p{} db",
    "/usr/bin/mysqldump -p{} db",
    "redis-cli -h host -a {} ping",
    "unzip -P {} a.zip",
    "unzip -qP {} a.zip",
    "7z x -p{} a.7z",
    "docker login -u me -p {} host",
    "podman login -p{} host",
    "az login -u me -p {}",
    "sshpass -p{} ssh host",
    "sshpass -p {} mysql -p{}",
    "ldapsearch -x -w {}",
    "openssl enc -aes256 -passin pass:{}",
    "tool --key {}",
    "tool --key={}",
    "tool --session-id {}",
    "tool --credential {}",
    "tool --passphrase={}",
    "KEY={} tool",
    "ENCRYPTION_KEY={} tool",
    "MYSQL_SESSION={} tool",
    "2FA_TOKEN={} tool",
    "kubectl create generic x --from-literal=password={}",
    "docker build --build-arg=HF_TOKEN={} .",
    "echo machine host login me password {}",
]
SCRIPTS = [
    "curl -u 'me:{} x' https://host",
    "redis-cli -a '{} x' ping",
    'redis-cli -a "$A {}" ping',
    "mysql -p'x {}' db",
    'bash -c "mysql -p{} db"',
    "bash -c \"sshpass -p'x {}' ssh host\"",
    "mc alias set store https://host me 'x {}'",
    "cat <<E > ~/.tool\n[default]\npassword = {}\nE",
    "cat <<E > ~/.netrc\nmachine host\n  login me\n  password {}\nE",
    "printf 'machine host login me password {}' > ~/.netrc",
    "python -c \"open_it(token = '{}')\"",
    "python -c \"login('{}')\"",
    "python -c \"import os; os.environ['HF_TOKEN']='{}'\"",
    "python -c \"import os; os.environ['HF_TOKEN'] = '{}'\"",
    "python -c \"import os; os.environ.setdefault('HF_TOKEN', '{}')\"",
    'python -c \'x = {{"a": 1, "password": "{}"}}\'',
    'echo "{{\\"user\\": \\"me\\", \\"password\\": \\"{}\\"}}"',
    "curl -d '{{user: me, password: {}}}' https://host",
    "TOKEN=$(echo {}) tool",
    'TOKEN="$(echo "x $(echo {})")" tool',
    "TOKEN=`echo {}` tool",
    "TOKEN=${{TOKEN:-{}}} tool",
    "TOKEN=\\\n{} tool",
    "tool --token \\\n  {}",
    "curl -u \\\n me:{}",
    'tool --password "{}',
    "TOKEN=$(echo {}",
]


@pytest.mark.parametrize("form", COMMANDS)
def test_secrets_in_the_words_of_a_command_are_hidden_and_decide(form: str) -> None:
    shown, secrets = take_command_secrets(form.format(SECRET, SECRET).split(" "))
    assert SECRET not in " ".join(shown)
    assert any(SECRET in secret for secret in secrets)
    assert shown[0].partition("=")[0] == form.split()[0].partition("=")[0]
    keys = set()
    for value in (SECRET, "another"):
        found = command_part(form.format(value, value).split(" "))
        keys.add(fingerprint([*found.parts, *secret_part(found.parts, found.secrets)]))
        assert found.parts == command_part(form.format(SECRET, SECRET).split(" ")).parts
    assert len(keys) == 2


@pytest.mark.parametrize("form", COMMANDS + SCRIPTS)
def test_secrets_in_a_script_are_hidden_and_taken(form: str) -> None:
    script = f"set -e; {form.format(SECRET, SECRET)}"
    (_, _, text), secrets = take_command_secrets(["sh", "-c", script])
    assert SECRET not in text
    assert any(SECRET in secret for secret in secrets)
    assert text.startswith("set -e; ")
    assert take_secrets(text)[0] == text


@pytest.mark.parametrize(
    "script",
    [
        "pip install -p x && uv pip install -p 3.11 x",
        "mkdir -p dir && cp -a x y && cp -P x y && python -u x.py; tar -b 20 -cf x.tar x",
        "git clone -b branch https://host/x && rsync -aP x y",
        "docker run -p 80:80 -u 1000:1000 image && docker login ghcr.io",
        "curl -fsSL -o/tmp/bundle -H 'Accept: text/json' -b cookies.txt https://host/x",
        "curl https://host/x | python -u -; mysql -u root -p db && mkdir -p dir",
        "curl -u $USER:$PASSWORD -HX-Token:$TOKEN https://host",
        "bash --login setup.sh && apt-key add key.asc && gpg --recv-keys ABCD",
        "pip config set global.index-url https://host/simple && git config --global user.name me",
        "conda config --set channel_priority strict && unzip -q -d dir x.zip",
        "echo 'the token is in the file, the password for it in another'",
        "TOKEN=$(cat /run/secrets/token) tool && TOKEN=$TOKEN tool && HF_TOKEN= pip install x",
        'TOKEN="$A$B" tool; [ "$TOKEN" = "" ] || tool --max-tokens 5 --tokenizer x',
        "printf 'gpgkey=https://host/x.gpg' > x.repo; python -m pip install tokenizers secrets",
        "for key in a b; do touch $key; done; monkey=1 sort --parallel=2",
    ],
)
def test_ordinary_scripts_stay_readable(script: str) -> None:
    """Their keys are those that earlier releases computed."""
    assert take_command_secrets(["sh", "-c", script]) == (["sh", "-c", script], ())


_PIECES = st.sampled_from(
    [
        *("token", "--key", "password", "mysql", "-p", "curl", "-sSu", "-H", "a:b", "login", "$X"),
        *("mc", "alias", "set", "config", "Bearer", "authorization", " ", "\n", " ", "=", ":", "'"),
        *('"', "`", "$(", ")", "\\", "{", ",", "[", "]", ";", "|"),
    ]
)


@given(st.lists(_PIECES, max_size=12), st.sampled_from(["--token=", "HF_TOKEN=", "mysql -p"]))
def test_nothing_around_a_secret_lets_it_through(pieces: list[str], name: str) -> None:
    """Nor is it lost for the key, whatever stands in front of it."""
    text, secrets = take_secrets(f"{''.join(pieces)}\n{name}{SECRET}")
    assert SECRET not in text
    assert any(SECRET in secret for secret in secrets)


@pytest.mark.parametrize(
    "unit",
    [
        *("token ", "token=", "key='", 'key="', 'key="$(', 'key="a $( ', 'key="$A $( ', "k=$("),
        *("a: ", "key:'", "-u ", 'mysql -p"', "curl -sS", "a\\\n", '\\"', "login(", "$(((", "a  "),
        *("mc alias set a b ", "token \\\n", "--a-", '["token", ', "key=`", "token = ", '"a" '),
    ],
)
def test_steps_grow_in_proportion_to_the_text(unit: str) -> None:
    def steps(chars: int) -> int:
        count = 0

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal count
            if frame.f_code.co_filename not in (redact.__file__, redact_words.__file__):
                return None
            count += 1
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            take_secrets(unit * (chars // len(unit)))
        finally:
            sys.settrace(previous)
        return count

    # Twice the text, twice the steps: beyond 200 signs no quotation is followed.
    assert steps(20_000) < 2.5 * steps(10_000) + 10_000
    take_secrets(unit * (200_000 // len(unit)))  # no step of the patterns themselves explodes
