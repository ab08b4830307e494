"""The files of `export/` say what TF Serving reads, and agree with one another."""

import pathlib
import re

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format, wrappers_pb2
from tensorflow_serving.config import model_server_config_pb2

yaml = pytest.importorskip("yaml")

EXPORT = pathlib.Path(__file__).resolve().parents[2] / "export"
FIELD = descriptor_pb2.FieldDescriptorProto
# Messages of TF Serving that its Python package leaves out, with the numbers of session_bundle_config.proto and
# monitoring_config.proto.
MESSAGES = {
    "BatchingParameters": {
        "max_batch_size": (1, "Int64Value"),
        "batch_timeout_micros": (2, "Int64Value"),
        "max_enqueued_batches": (3, "Int64Value"),
        "num_batch_threads": (4, "Int64Value"),
        "thread_pool_name": (5, "StringValue"),
        "enable_large_batch_splitting": (8, "BoolValue"),
        "max_execution_batch_size": (9, "Int64Value"),
    },
    "PrometheusConfig": {"enable": (1, FIELD.TYPE_BOOL), "path": (2, FIELD.TYPE_STRING)},
    "MonitoringConfig": {"prometheus_config": (1, "PrometheusConfig")},
}


def message(name):
    file = descriptor_pb2.FileDescriptorProto(name="serving.proto", package="serving", syntax="proto3")
    file.dependency.append("google/protobuf/wrappers.proto")
    for kind, fields in MESSAGES.items():
        made = file.message_type.add(name=kind)
        for field, (number, of) in fields.items():
            added = made.field.add(name=field, number=number, label=FIELD.LABEL_OPTIONAL)
            if isinstance(of, str):
                package = "serving" if of in MESSAGES else "google.protobuf"
                added.type, added.type_name = FIELD.TYPE_MESSAGE, f".{package}.{of}"
            else:
                added.type = of
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(wrappers_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"serving.{name}"))()


def parsed(path, into):
    return text_format.Parse((EXPORT / path).read_text(), into)


def models():
    config = parsed("models.config", model_server_config_pb2.ModelServerConfig())
    return {model.name: model for model in config.model_config_list.config}


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((EXPORT / "docker-compose.yml").read_text())["services"]["serving"]


@pytest.fixture(scope="module")
def kubernetes():
    return {entry["kind"]: entry for entry in yaml.safe_load_all((EXPORT / "kubernetes.yaml").read_text())}


@pytest.fixture(scope="module")
def container(kubernetes):
    (only,) = kubernetes["Deployment"]["spec"]["template"]["spec"]["containers"]
    return only


def test_the_models_are_an_embedder_and_a_retriever():
    assert set(models()) == {"embedder", "retriever"}
    for name, model in models().items():
        assert model.base_path == f"/models/{name}"
        assert model.model_platform == "tensorflow"
        # One version serves while the next is loaded, and can be asked for by number after it.
        assert model.model_version_policy.latest.num_versions == 2


def test_batching_and_monitoring_are_what_tf_serving_reads():
    batching = parsed("batching.config", message("BatchingParameters"))
    assert batching.max_batch_size.value == 32
    assert batching.num_batch_threads.value >= 1
    monitoring = parsed("monitoring.config", message("MonitoringConfig"))
    assert monitoring.prometheus_config.enable
    assert monitoring.prometheus_config.path.startswith("/")


def test_compose_and_kubernetes_start_the_server_alike(compose, container, kubernetes):
    assert (compose["command"], compose["image"]) == (container["args"], container["image"])
    assert compose["entrypoint"] == container["command"]
    server = dict(word.removeprefix("--").split("=", 1) for word in container["args"])
    for name, value in server.items():
        if name.endswith("_file"):
            assert (EXPORT / value.removeprefix("/config/")).is_file()
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    assert ports == {"grpc": server["port"], "rest": server["rest_api_port"]}
    for port in kubernetes["Service"]["spec"]["ports"]:
        assert str(port["port"]) == ports[port["targetPort"]]
    assert compose["ports"] == [f"127.0.0.1:{port}:{port}" for port in ports.values()]
    notes = kubernetes["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    monitoring = parsed("monitoring.config", message("MonitoringConfig")).prometheus_config
    assert (notes["prometheus.io/port"], notes["prometheus.io/path"]) == (ports["rest"], monitoring.path)


def test_the_config_map_holds_the_files_of_this_folder(kubernetes, container):
    content = kubernetes["ConfigMap"]["data"]
    assert {name: (EXPORT / name).read_text() for name in content} == content
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"models": "/models", "config": "/config"}
    volumes = {volume["name"]: volume for volume in kubernetes["Deployment"]["spec"]["template"]["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] == kubernetes["ConfigMap"]["metadata"]["name"]


def test_probes_ask_for_a_model_that_is_served(compose, container, kubernetes):
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"].removeprefix("/v1/models/") in models()
    asked = re.search(r"GET /v1/models/(\w+)", " ".join(compose["healthcheck"]["test"]))
    assert asked[1] in models()
    for bound in ("requests", "limits"):
        assert set(container["resources"][bound]) == {"cpu", "memory"}
    deployment, service, budget = (
        kubernetes[kind]["spec"] for kind in ("Deployment", "Service", "PodDisruptionBudget")
    )
    selectors = [deployment["selector"]["matchLabels"], service["selector"], budget["selector"]["matchLabels"]]
    assert selectors == [deployment["template"]["metadata"]["labels"]] * 3
