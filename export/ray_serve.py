#!/usr/bin/env python3
"""The web application of `tfdml serve` in Ray Serve: replicas on one or on many machines.

    pip install 'tfdml[web]' 'ray[serve]'
    python export/ray_serve.py /models/embedder --replicas=4 --port=8501

Requests and answers are those of `tfdml serve`. Ray starts a replica again that has died. Each
machine reads the folder under the same path. By RAY_ADDRESS the replicas run in a cluster.
"""

import argparse
import pathlib

from ray import serve


def deployment_of(folder: pathlib.Path, replicas: int):
    """Return the deployment of the newest version of a model."""

    def build():  # in the process of each replica
        from tfdml.embeddings.model_card import served_version
        from tfdml.web.application import application
        from tfdml.web.lanes import Lanes
        from tfdml.web.rest import ServedModel, rest_routes
        from tfdml.web.settings import WebSettings

        model = ServedModel(served_version(folder), folder.name)
        return application(rest_routes(model, Lanes(WebSettings())))

    return serve.deployment(serve.ingress(build)(), num_replicas=replicas)


def main() -> None:
    """Parse the command line, and serve until the process is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="folder of the versions that tfdml export wrote")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8501)
    args = parser.parse_args()
    folder = pathlib.Path(args.folder).absolute()
    application = deployment_of(folder, args.replicas).bind()
    serve.start(http_options={"host": args.host, "port": args.port})
    serve.run(application, name=folder.name, route_prefix="/", blocking=True)


if __name__ == "__main__":
    main()
