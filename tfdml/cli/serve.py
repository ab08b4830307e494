r"""Serve an exported embedder or retriever over HTTP, in TensorFlow Serving's REST format.

  tfdml serve --model=models/cars
  tfdml serve --model=models/cars_retriever --name=retriever --port=8502 --lanes=4
  curl -d "{\"instances\": [{\"b64\": \"$(base64 -w0 car.jpg)\"}]}" http://127.0.0.1:8501/v1/models/cars:predict

The newest version in the folder is served. A newer one needs a new server. SIGTERM and Ctrl-C end
the server once it has answered what was begun, or after twice --timeout; a second one ends it at
once. /healthz answers once the model runs, and /metrics counts requests.

Nobody is asked for a password, and nothing is encrypted: put a proxy in front before you name
another --host.
"""

import dataclasses
import os
import re
from pathlib import Path
from typing import ClassVar

from tfdml.cli.command_line import Command, CommandFlags, Flags, check_web, load_tensorflow
from tfdml.errors import UserError
from tfdml.options import option
from tfdml.web.settings import WebSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeFlags(CommandFlags):
    """What is served, and where."""

    title: ClassVar[str] = "What is served, and where"

    model: str = option(help="Folder of the versions that tfdml export wrote.")
    name: str = option("", help="What requests call the model; empty: the name of the folder.")
    port: int = option(
        8501, at_least=0, at_most=65535, help="Port to listen at; 0: any that is free."
    )


def serve(flags: ServeFlags, settings: WebSettings) -> None:
    """Serve as the flags say."""
    from tfdml.embeddings.model_card import served_version

    folder = Path(os.path.expanduser(flags.model)).absolute()
    name = flags.name or folder.name
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
        raise UserError("a model's name has letters, digits, dots and dashes", name=name)
    version = served_version(folder)
    if version is None or version == folder:
        raise UserError(
            "there is no version in it; name a folder that tfdml export wrote to", model=flags.model
        )
    check_web()
    from tfdml.web import server

    with server.listen(settings.host, flags.port) as opened:
        print(f"loading version {version.name} of {folder}", flush=True)
        load_tensorflow()
        from tfdml.web.application import application
        from tfdml.web.lanes import Lanes
        from tfdml.web.rest import ServedModel, rest_routes

        model = ServedModel(version, name)
        lanes = Lanes(settings)
        app = application(rest_routes(model, lanes))
        announcement = f"serving at {server.address_of(opened)}/v1/models/{name}"
        grace = int(2 * settings.timeout)
        connections = settings.max_waiting + server.CONNECTIONS
        server.serve(app, opened, announcement, lanes, grace, connections)


COMMAND = Command("serve", serve, Flags(ServeFlags, WebSettings), __doc__, needs_tensorflow=False)
