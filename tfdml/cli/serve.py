r"""Serve an exported embedder or retriever over HTTP, in TensorFlow Serving's REST format.

  tfdml serve --model=models/cars
  tfdml serve --model=models/cars_retriever --name=retriever --port=8502 --replicas=2
  curl -d "{\"instances\": [{\"b64\": \"$(base64 -w0 car.jpg)\"}]}" http://127.0.0.1:8501/v1/models/cars:predict

The newest version in the folder is served. A newer one needs a new server. SIGTERM and Ctrl-C
answer what was begun, and end.

Nobody is asked for a password, and nothing is encrypted: put a proxy in front before you name
another --host.
"""

import dataclasses
import importlib.util
import os
import re
import secrets
from pathlib import Path
from typing import ClassVar

from tfdml.cli.command_line import Command, CommandFlags, Flags
from tfdml.cluster.settings import ServeSettings
from tfdml.errors import UserError
from tfdml.options import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeFlags(CommandFlags):
    """What is served, and where."""

    title: ClassVar[str] = "What is served, and where"

    model: str = option(help="Folder of the versions that tfdml export wrote.")
    name: str = option("", help="What requests call the model; empty: the name of the folder.")
    host: str = option("127.0.0.1", help="Address to listen at; 0.0.0.0: at all of this machine.")
    port: int = option(
        8501, at_least=0, at_most=65535, help="Port to listen at; 0: any that is free."
    )


def serve(flags: ServeFlags, settings: ServeSettings) -> None:
    """Serve as the flags say."""
    from tfdml.cluster.ray_session import import_ray
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
    for package in ("ray", "fastapi", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"serving needs the package {package}: pip install 'tfdml[serve]'")
    from tfdml.io.http import listen

    with listen(flags.host, flags.port) as listening:
        # Before Ray is imported: it listens to this machine alone, and there to those who know a
        # secret.
        os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        import_ray()
        from tfdml.cluster import serving

        serving.serve(version, name, listening, settings)


COMMAND = Command("serve", serve, Flags(ServeFlags, ServeSettings), __doc__)
