"""Secrets with the keys of jobs' fan-outs: made once, bounded in number, refused with a reason."""

from bootseer.fanout.keys import parse_secret
from bootseer.kubernetes.api import Api
from bootseer.kubernetes.webhook.plan import KeySecret
from bootseer.kubernetes.webhook.pods import OwnerReference
from bootseer.kubernetes.webhook.server import KeySecrets
from tests.bootseer.kubernetes.webhook.api_servers import ApiServer

OWNER = OwnerReference(api_version="batch/v1", kind="Job", name="train", uid="u-1")
SECRETS = "/api/v1/namespaces/bootseer-system/secrets"


def test_replicas_make_a_secret_once(api_server: ApiServer) -> None:
    api_server.install()
    secret = KeySecret("bootseer-fanout-1", OWNER)
    first, second = (KeySecrets(Api(api_server.account)) for _ in range(2))
    assert first.ensure("bootseer-system", secret) == ""
    before = api_server.ask("GET", f"{SECRETS}/bootseer-fanout-1")
    assert [one.ensure("bootseer-system", secret) for one in (first, second)] == ["", ""]
    assert api_server.ask("GET", f"{SECRETS}/bootseer-fanout-1") == before
    assert before["metadata"]["ownerReferences"][0]["uid"] == "u-1"


def test_a_secret_that_is_refused_is_told(api_server: ApiServer) -> None:
    """The namespace does not exist, or its name would change the path."""
    secrets = KeySecrets(Api(api_server.account))
    secret = KeySecret("bootseer-fanout-1", OWNER)
    for namespace in ("", "../../x", "a/b", "A"):
        assert secrets.ensure(namespace, secret) == "the pod has no namespace"
    assert "bootseer-fanout-1 cannot be made" in secrets.ensure("missing", secret)


def test_whoever_reaches_the_port_gets_a_bounded_number(api_server: ApiServer) -> None:
    api_server.install()
    secrets = KeySecrets(Api(api_server.account))
    said = {secrets.ensure("bootseer-system", KeySecret(f"s{n}", OWNER)) for n in range(130)}
    assert said == {"", "too many jobs ask for a key at once"}


def test_the_document_has_another_key_each_time() -> None:
    secret = KeySecret("s", OWNER)
    keys = {secret.document()["stringData"]["key"] for _ in range(3)}
    assert len(keys) == 3
    assert all(len(parse_secret(key.encode(), "it")) == 32 for key in keys)
