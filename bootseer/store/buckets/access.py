"""Configuration of bucket access: builds an obstore store from a URL, the environment and `~/.aws`.

obstore (Rust's object_store) itself reads environment variables, web identities (IRSA) and the
roles of pods and instances, but not the profiles of `~/.aws`. Profiles are read here, with the
precedence of Amazon's clients ("Configuration and credential precedence" of the AWS CLI). A profile
that needs a login of several steps (SSO, a role of another profile) is left to boto3, if installed.
"""

import configparser
import json
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

from msgspec import Struct

from bootseer.base.redact import has_login, public_url
from bootseer.errors import InvalidInputError, PermissionDeniedError, UnsupportedError
from bootseer.store.buckets.answers import NO_CREDENTIALS
from bootseer.store.deadline import SLOWEST_BYTES_PER_S
from bootseer.store.paths import BUCKETS, split_scheme
from bootseer.transfer.policy import REQUEST

_PROCESS_S = 60.0
# Longer than a start waits for the first answer: a resolver alone may take 5 s, once.
_CONNECT_S = 10.0
# Limit of a whole response body. A silent one is given up much earlier.
_BODY_S = 7200.0
# Options of s3fs, by the names that obstore uses; `client_kwargs` may contain them too.
_KEYS = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "token",
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "token",
}
_PLACES = {"endpoint_url": "endpoint", "region_name": "region"}
# Options of fsspec file systems that concern neither the endpoint nor the credentials.
_IGNORED_OPTIONS = frozenset(
    ("skip_instance_cache", "use_listings_cache", "asynchronous", "config_kwargs", "use_ssl")
)

Credentials = dict[str, Any]


class Address(Struct, frozen=True):
    """Provider, bucket, and prefix of all keys in the bucket ("" if there is none)."""

    kind: str
    bucket: str
    prefix: str


def address_of(url: str) -> Address:
    """Parse the URL of a bucket. Raises: InvalidInputError."""
    kind = BUCKETS[split_scheme(url)]
    if has_login(url) and kind == "s3":
        raise InvalidInputError(
            f"cannot open {public_url(url)}: S3 takes no credentials from a URL; use "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials"
        )
    rest = url.partition("://")[2]
    bucket, _, prefix = rest.partition("/")
    return Address(kind, bucket, prefix.strip("/"))


def load_obstore() -> Any:
    """Import and return the package obstore. Raises: UnsupportedError if it is not installed."""
    try:
        import obstore.store
    except ImportError as error:
        raise UnsupportedError(
            f"buckets need the package obstore, which cannot be loaded ({error}): "
            "pip install bootseer[s3]"
        ) from error
    return obstore


def open_bucket(
    address: Address,
    options: Mapping[str, Any],
    deadline_s: float,
    sent_bytes: int = 0,
    *,
    is_upload: bool = False,
) -> Any:
    """Return an obstore store for one bucket, without sending a request.

    Args:
        address: The bucket.
        options: Options of fsspec's file system for this kind of URL.
        deadline_s: Longest wait of a request.
        sent_bytes: Most bytes that one request sends; 0 for reads, whose response may take as long
            as bytes arrive.
        is_upload: Whether the store uploads the parts of large objects.

    Raises: InvalidInputError, PermissionDeniedError; UnsupportedError without obstore.
    """
    stores = load_obstore().store
    # Longer than the caller's own deadline, whose error says more. These timeouts end requests that
    # the caller has left behind.
    silent_s = 1.5 * deadline_s + 1.0 + sent_bytes / SLOWEST_BYTES_PER_S
    client: dict[str, Any] = {
        "connect_timeout": _duration(min(_CONNECT_S, deadline_s)),
        "read_timeout": _duration(silent_s),
        "timeout": _duration(silent_s if sent_bytes else _BODY_S),
    }
    arguments: dict[str, Any] = {"client_options": client, "retry_config": {"max_retries": 0}}
    if is_upload:
        # We cannot send a single part again, so obstore does, with the numbers of our policy.
        arguments["retry_config"] = {
            "max_retries": int(REQUEST.attempts) - 1,
            "backoff": {
                "init_backoff": timedelta(seconds=REQUEST.base_s),
                "max_backoff": timedelta(seconds=REQUEST.cap_s),
            },
            "retry_timeout": timedelta(seconds=deadline_s),
        }
    if address.kind == "s3":
        config, provider = _s3_config(options, os.environ)
        if provider is not None:
            arguments["credential_provider"] = provider
        client["allow_http"] = config.get("endpoint", "").startswith("http://")
        if bundle := os.environ.get("AWS_CA_BUNDLE"):
            client["root_certificate"] = _read(Path(bundle))
        kind: Callable[..., Any] = stores.S3Store
    else:
        config = {name: value for name, value in options.items() if name not in _IGNORED_OPTIONS}
        kind = stores.GCSStore if address.kind == "gcs" else stores.AzureStore
    bucket = address.bucket
    if address.kind == "azure" and "@" in bucket:
        # abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH
        bucket, _, host = bucket.partition("@")
        config.setdefault("account_name", host.partition(".")[0])
    try:
        return kind(bucket, config=config, **arguments)
    except Exception as error:
        reason = str(error).partition("\n")[0][:300]
        raise InvalidInputError(f"cannot open the bucket {bucket}: {reason}") from error


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"


def _endpoint_of(environ: Mapping[str, str]) -> str:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        if environ.get(name):
            return environ[name]
    return ""


def _s3_config(
    options: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[dict[str, Any], Callable[[], Credentials] | None]:
    """Return obstore's configuration, and the credential provider if obstore needs one from us."""
    config: dict[str, Any] = {}
    keys: dict[str, str] = {}
    given = {**options, **dict(options.get("client_kwargs") or {})}
    given.pop("client_kwargs", None)
    profile = given.pop("profile", None)
    if given.pop("anon", False) or environ.get("AWS_NO_SIGN_REQUEST", "").lower() == "true":
        config["skip_signature"] = True
    for name, value in given.items():
        if name in _IGNORED_OPTIONS or value is None:
            continue
        if name in _KEYS:
            keys[_KEYS[name]] = str(value)
        elif name in _PLACES:
            config[_PLACES[name]] = str(value)
        else:
            known = ", ".join(sorted((*_KEYS, *_PLACES, "anon", "profile")))
            raise InvalidInputError(f"the option {name!r} of s3 is not known here; known: {known}")
    name = profile or environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE")
    found = _profile(name or "default", environ, must_exist=bool(name))
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or found.get("region")
    if region:
        config.setdefault("region", region)
    if endpoint := _endpoint_of(environ) or found.get("endpoint_url"):
        config.setdefault("endpoint", endpoint)
    if config.get("skip_signature"):
        return config, None
    if "access_key_id" in keys:
        return config, partial(_credentials, keys)
    is_web_identity = environ.get("AWS_WEB_IDENTITY_TOKEN_FILE") and environ.get("AWS_ROLE_ARN")
    if not profile and (environ.get("AWS_ACCESS_KEY_ID") or is_web_identity):
        return config, None
    provider = _profile_provider(found, name or "default")
    is_container = any(name.startswith("AWS_CONTAINER_CREDENTIALS_") for name in environ)
    is_silent = environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if provider is None and is_silent and not is_container:
        raise PermissionDeniedError(f"cannot open the bucket: {NO_CREDENTIALS}")
    return config, provider


def _credentials(keys: Mapping[str, str]) -> Credentials:
    # Not part of the configuration, to which obstore would add the environment's session token.
    return {
        "access_key_id": keys["access_key_id"],
        "secret_access_key": keys.get("secret_access_key", ""),
        "token": keys.get("token"),
        "expires_at": None,
    }


def _profile(name: str, environ: Mapping[str, str], *, must_exist: bool) -> dict[str, str]:
    """Return the settings of one profile from both files in `~/.aws`."""
    home = Path(environ.get("HOME") or "~").expanduser()
    files = {
        name: environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws/credentials",
        f"profile {name}": environ.get("AWS_CONFIG_FILE") or home / ".aws/config",
    }
    found: dict[str, str] = {}
    is_there = False
    for section, path in files.items():
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidInputError(f"{path} cannot be read: {reason}") from error
        for each in (section, "default") if name == "default" else (section,):
            if parser.has_section(each):
                is_there = True
                # The credentials file takes precedence over the configuration file.
                found = {**dict(parser.items(each)), **found}
    if must_exist and not is_there:
        places = " or ".join(map(str, files.values()))
        raise InvalidInputError(f"there is no profile {name!r} in {places}")
    return found


def _profile_provider(found: Mapping[str, str], name: str) -> Callable[[], Credentials] | None:
    """Return the credential provider of a profile; None if the profile has no credentials."""
    if "aws_access_key_id" in found:
        keys = {_KEYS[key]: value for key, value in found.items() if key in _KEYS}
        return partial(_credentials, keys)
    if "credential_process" in found:
        return lambda: _from_process(found["credential_process"], name)
    if not any(key in found for key in ("role_arn", "sso_session", "sso_start_url")):
        return None
    try:
        import boto3  # type: ignore[import-untyped]
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise UnsupportedError(
            f"the profile {name!r} logs in by SSO or by another profile's role, which needs the "
            "package boto3: pip install boto3"
        ) from error
    provider: Any = Boto3CredentialProvider(boto3.Session(profile_name=name))
    return cast("Callable[[], Credentials]", provider)


def _from_process(command: str, name: str) -> Credentials:
    """Run a profile's `credential_process` and return the credentials that it prints.

    See "Sourcing credentials with an external process" of the AWS CLI.
    """
    try:
        # The command is from the user's own file, and is split like a shell's, as by the AWS CLI.
        done = subprocess.run(
            shlex.split(command), capture_output=True, timeout=_PROCESS_S, check=True
        )
        said = json.loads(done.stdout)
        expires = said.get("Expiration")
        return {
            "access_key_id": said["AccessKeyId"],
            "secret_access_key": said["SecretAccessKey"],
            "token": said.get("SessionToken"),
            "expires_at": datetime.fromisoformat(expires) if expires else None,
        }
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        raise PermissionDeniedError(
            f"the credential_process of the profile {name!r} failed: {type(error).__name__}"
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"AWS_CA_BUNDLE: {path} cannot be read: {error}") from error
