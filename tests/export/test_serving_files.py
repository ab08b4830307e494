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
    "batching.config": "max_batch_size batch_timeout_micros max_enqueued_batches num_batch_threads thread_pool_name "
    "enable_large_batch_splitting max_execution_batch_size value",
    "monitoring.config": "prometheus_config enable path",
}


def fields(name):
    """The values in a file of text format, by field or by the field around it."""
    found = re.findall(r"(\w+)\s*(?::|\{\s*value:)\s*\"?([^\s\"}]+)", (EXPORT / name).read_text())
    assert {*re.findall(r"^\s*(\w+)\s*[:{]", (EXPORT / name).read_text(), re.M)} <= {*FIELDS[name].split()}
    return dict(found)


MODELS = {
    model.name: model
    for model in text_format.Parse(
        (EXPORT / "models.config").read_text(), model_server_config_pb2.ModelServerConfig()
    ).model_config_list.config
}
COMPOSE = yaml.safe_load((EXPORT / "docker-compose.yml").read_text())["services"]["serving"]
KUBERNETES = {entry["kind"]: entry for entry in yaml.safe_load_all((EXPORT / "kubernetes.yaml").read_text())}
(CONTAINER,) = KUBERNETES["Deployment"]["spec"]["template"]["spec"]["containers"]


def test_models_batching_and_monitoring_are_what_tf_serving_reads():
    assert set(MODELS) == {"embedder", "retriever"}
    for name, model in MODELS.items():
        assert (model.base_path, model.model_platform) == (f"/models/{name}", "tensorflow")
        # One version serves while the next is loaded, and can be asked for by number after it.
        assert model.model_version_policy.latest.num_versions == 2
    batching, monitoring = fields("batching.config"), fields("monitoring.config")
    assert batching["max_batch_size"] == "32"
    assert int(batching["num_batch_threads"]) >= 1
    assert (monitoring["enable"], monitoring["path"][0]) == ("true", "/")


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
    notes = KUBERNETES["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert (notes["prometheus.io/port"], notes["prometheus.io/path"]) == (
        ports["rest"],
        fields("monitoring.config")["path"],
    )


def test_the_config_map_holds_the_files_of_this_folder():
    content = KUBERNETES["ConfigMap"]["data"]
    assert {name: (EXPORT / name).read_text() for name in content} == content
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert mounts == {"models": "/models", "config": "/config"}
    volumes = {volume["name"]: volume for volume in KUBERNETES["Deployment"]["spec"]["template"]["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] == KUBERNETES["ConfigMap"]["metadata"]["name"]


def test_probes_ask_for_a_model_that_is_served():
    for probe in ("startupProbe", "readinessProbe"):
        assert CONTAINER[probe]["httpGet"]["path"].removeprefix("/v1/models/") in MODELS
    asked = re.search(r"GET /v1/models/(\w+)", " ".join(COMPOSE["healthcheck"]["test"]))
    assert asked[1] in MODELS
    for bound in ("requests", "limits"):
        assert set(CONTAINER["resources"][bound]) == {"cpu", "memory"}
    deployment, service, budget = (
        KUBERNETES[kind]["spec"] for kind in ("Deployment", "Service", "PodDisruptionBudget")
    )
    selectors = [deployment["selector"]["matchLabels"], service["selector"], budget["selector"]["matchLabels"]]
    assert selectors == [deployment["template"]["metadata"]["labels"]] * 3
