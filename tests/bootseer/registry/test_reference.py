"""Names of images, as Docker reads them."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import InvalidInputError
from bootseer.registry.reference import Reference, parse_reference

DIGEST = f"sha256:{'0a' * 32}"


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("python", "docker.io/library/python:latest"),
        ("python:3.12-slim", "docker.io/library/python:3.12-slim"),
        ("team/train", "docker.io/team/train:latest"),
        ("docker.io/python", "docker.io/library/python:latest"),
        ("index.docker.io/team/x:1", "docker.io/team/x:1"),
        ("localhost/x", "localhost/x:latest"),
        ("localhost:5000/x", "localhost:5000/x:latest"),
        ("host:5000/a/b/c:v1", "host:5000/a/b/c:v1"),
        ("quay.io/a__b/c-d.e", "quay.io/a__b/c-d.e:latest"),
        ("[::1]:5000/x:v", "[::1]:5000/x:v"),
        ("[2001:db8::1]/x", "[2001:db8::1]/x:latest"),
        (f"x@{DIGEST}", f"docker.io/library/x@{DIGEST}"),
        (f"h.io/x:v1@{DIGEST}", f"h.io/x:v1@{DIGEST}"),
        ("Host/x", "Host/x:latest"),
    ],
)
def test_names_are_completed_as_docker_does(text: str, whole: str) -> None:
    assert str(parse_reference(text)) == whole


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "x:",
        "x@",
        "/x",
        "x/",
        "a//b",
        "Python",
        "x:v 1",
        "x@sha256:abc",
        f"x@md5:{'0' * 32}",
        "host:port/x",
        "h.io/../etc",
        "h.io/.x",
        "user:secret@h.io/x",
        "[::1/x",
        "[::zz]:5000/x",
        "[1:2]:5000/x",
        "x:" + "t" * 129,
        "h.io/" + "a/" * 130 + "b",
        "h.io/x?y",
        "h.io/x\n",
        "-h.io/x",
        "http://h.io/x",
    ],
)
def test_what_names_no_image(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"image"):
        parse_reference(text)


def test_the_digest_wins_over_the_tag() -> None:
    assert parse_reference(f"x:v1@{DIGEST}").target == DIGEST
    assert parse_reference("x:v1").target == "v1"


_component = st.from_regex(r"[a-z0-9]+((\.|_|__|-{1,3})[a-z0-9]+){0,2}", fullmatch=True)
_hosts = st.one_of(
    st.from_regex(r"[a-z0-9]{1,9}(\.[a-zA-Z0-9]{1,9}){1,3}(:[0-9]{1,5})?", fullmatch=True),
    st.sampled_from(["localhost", "[::1]:5000", "[fe80::1]", "127.0.0.1:1"]),
)


@given(
    _hosts,
    st.lists(_component, min_size=2, max_size=4).map("/".join),
    st.none() | st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True),
    st.none() | st.just(DIGEST),
)
def test_what_is_written_is_read_back(
    host: str, repository: str, tag: str | None, digest: str | None
) -> None:
    reference = Reference(host, repository, tag or (None if digest else "latest"), digest)
    assert parse_reference(str(reference)) == reference


@given(st.text(alphabet=string.printable, max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        reference = parse_reference(text)
    except InvalidInputError:
        return
    assert parse_reference(str(reference)) == reference
    assert not set(str(reference)) & set(" \t\r\n?#%\\")


def test_a_login_in_a_name_is_not_shown() -> None:
    with pytest.raises(InvalidInputError) as caught:
        parse_reference("user:s3cret@registry.example/team/train:v1")
    assert "s3cret" not in str(caught.value)
    assert "registry.example/team/train:v1" in str(caught.value)
