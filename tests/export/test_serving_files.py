"""The files of `export/` say what TF Serving reads, and agree with one another."""

import pathlib
import re

import pytest
from google.protobuf import text_format
from tensorflow_serving.config import model_server_config_pb2

yaml = pytest.importorskip("yaml")

EXPORT = pathlib.Path(__file__).resolve().parents[2] / "export"
# Fields of messages that TF Serving's Python package leaves out, by session_bundle_config.proto and
# monitoring_config.proto.
FIELDS = {
    "batching.config": "max_batch_size batch_timeout_micros max_enqueued_batches num_batch_threads "
    "thread_pool_name "
    "enable_large_batch_splitting max_execution_batch_size value",
    "monitoring.config": "prometheus_config enable path",
}
COMPOSE = yaml.safe_load((EXPORT / "docker-compose.yml").read_text())["services"]["serving"]
KUBERNETES = {
    entry["kind"]: entry for entry in yaml.safe_load_all((EXPORT / "kubernetes.yaml").read_text())
}
(CONTAINER,) = KUBERNETES["Deployment"]["spec"]["template"]["spec"]["containers"]


def test_models_batching_and_monitoring_are_what_tf_serving_reads():
    text = (EXPORT / "models.config").read_text()
    models = text_format.Parse(
        text, model_server_config_pb2.ModelServerConfig()
    ).model_config_list.config
    assert {(model.name, model.base_path) for model in models} == {
        ("embedder", "/models/embedder"),
        ("retriever", "/models/retriever"),
    }
    for model in models:
        # One version serves while the next is loaded, and can be asked for by number after it.
        assert model.model_version_policy.latest.num_versions == 2
    for name, fields in FIELDS.items():
        assert {*re.findall(r"^\s*(\w+)\s*[:{]", (EXPORT / name).read_text(), re.M)} <= {
            *fields.split()
        }
    for probe in ("startupProbe", "readinessProbe"):
        assert CONTAINER[probe]["httpGet"]["path"] in (
            "/v1/models/embedder",
            "/v1/models/retriever",
        )


def test_compose_and_kubernetes_start_the_server_alike():
    assert (COMPOSE["command"], COMPOSE["image"]) == (CONTAINER["args"], CONTAINER["image"])
    assert COMPOSE["entrypoint"] == CONTAINER["command"]
    server = dict(word.removeprefix("--").split("=", 1) for word in CONTAINER["args"])
    for name, value in server.items():
        if name.endswith("_file"):
            assert (EXPORT / value.removeprefix("/config/")).is_file()
    ports = {port["name"]: str(port["containerPort"]) for port in CONTAINER["ports"]}
    assert ports == {"grpc": server["port"], "rest": server["rest_api_port"]}
    for port in KUBERNETES["Service"]["spec"]["ports"]:
        assert str(port["port"]) == ports[port["targetPort"]]
    assert COMPOSE["ports"] == [f"127.0.0.1:{port}:{port}" for port in ports.values()]
    content = KUBERNETES["ConfigMap"]["data"]
    assert {name: (EXPORT / name).read_text() for name in content} == content
    deployment, service = KUBERNETES["Deployment"]["spec"], KUBERNETES["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == service["selector"] == labels
