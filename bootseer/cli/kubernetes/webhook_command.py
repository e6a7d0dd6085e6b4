"""`bootseer kubernetes webhook`: annotations of pods become what they ask for."""

from pathlib import Path

import click

from bootseer.base.redact import public_url
from bootseer.cli.output import current_config, say
from bootseer.errors import UnsupportedError
from bootseer.kubernetes.api import ACCOUNT, Api


@click.command(epilog="Example: bootseer kubernetes webhook --name bootseer-webhook")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=8443,
    show_default=True,
    metavar="N",
    help="Where it serves HTTPS, on all addresses.",
)
@click.option("--namespace", metavar="NAME", help="Default: that of the service account.")
@click.option(
    "--name",
    default="bootseer-webhook",
    show_default=True,
    metavar="NAME",
    help="Of its Service, its Secret and its MutatingWebhookConfiguration.",
)
@click.option(
    "--account",
    type=click.Path(path_type=Path),
    default=ACCOUNT,
    show_default=True,
    help="The service account: a folder with token, ca.crt and namespace.",
)
def webhook(port: int, namespace: str | None, name: str, account: Path) -> None:
    """Turn the annotations of pods into runtime class, volumes and variables.

    Makes its own certificate, and tells the API server of it. See docs/kubernetes-annotations.md.
    """
    try:
        from bootseer.kubernetes.webhook.server import ASK_S, serve
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"the webhook needs the Python module {error.name}: pip install 'bootseer[kubernetes]'"
        ) from error
    api = Api(account, ASK_S)
    serve(
        api,
        port=port,
        namespace=namespace or api.namespace,
        name=name,
        store_url=_told_store(),
        on_ready=lambda found: click.echo(f"serving on port {found}", err=True),
    )


def _told_store() -> str:
    """The store that annotated pods are told of; empty where nobody has named one."""
    config = current_config()
    store_url = config.settings.store_url
    if config.sources["store_url"] == "default":
        return ""
    if public_url(store_url) != store_url:
        say(
            f"warning: pods are not told of the store {public_url(store_url)}, since every pod "
            "would show the password or query in its URL"
        )
        return ""
    return store_url
