"""The manifests: rendered by the real kustomize, valid in every supported version, and by rules that schemas do not have."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from engine_shim import __version__
from tests import checkpoints
from tests.kubernetes import lint
from tests.kubernetes.lint import Document
from tests.processes import Sidecar, ballast, environment

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ("cpu", "gpu-dra", "gpu-device-plugin", "injected-vllm", "multi-node")
RENDERED = Path(__file__).with_name("rendered")
# Those with a schema in the package that Kubernetes supports; ResourceClaims are stable from 1.34 on.
VERSIONS = ("1.34.0", "1.35.0", "1.36.0", "1.37.0")


def render(overlay: str) -> str:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is missing: install it (the client alone; no cluster is needed)")
    folder = ROOT / "deploy" / "kubernetes" / "overlays" / overlay
    return subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=True, timeout=60).stdout


def load(text: str) -> list[Document]:
    return [document for document in yaml.safe_load_all(text) if document]


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_rendering_is_stable(overlay: str) -> None:
    """Twice the same bytes, and the documents that are kept beside this test: a change of a manifest is seen in full.

    To accept one: kubectl kustomize deploy/kubernetes/overlays/NAME > tests/kubernetes/rendered/NAME.yaml
    """
    first = render(overlay)
    assert render(overlay) == first
    assert load(first) == load((RENDERED / f"{overlay}.yaml").read_text())


@pytest.mark.parametrize("version", VERSIONS)
def test_schemas(overlay: str, version: str) -> None:
    for document in load((RENDERED / f"{overlay}.yaml").read_text()):
        if document["kind"] != "LeaderWorkerSet":  # a custom resource: its schema is ours, among the rules
            kubernetes_validate.validate(document, version, strict=True)
        for _, pod in lint.pods(document):
            metadata = {"name": "pod", **pod.get("metadata", {})}
            wrapped = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}
            kubernetes_validate.validate(wrapped, version, strict=True)


def test_the_schemas_are_strict() -> None:
    (document,) = [d for d in load((RENDERED / "cpu.yaml").read_text()) if d["kind"] == "Deployment"]
    document["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, VERSIONS[0], strict=True)


def test_rules(overlay: str) -> None:
    assert lint.problems(load((RENDERED / f"{overlay}.yaml").read_text())) == []


def _sidecar(pod: Document) -> Document:
    (one,) = [one for one in pod["spec"]["initContainers"] if one["name"] == "sidecar"]
    return one  # type: ignore[no-any-return]


def _engine(pod: Document) -> Document:
    one: Document = pod["spec"]["containers"][0]
    return one


def _set(where: Callable[[Document], Any], key: Any, value: Any) -> Callable[[Document], None]:
    def change(pod: Document) -> None:
        where(pod)[key] = value

    return change


BREACHES: dict[str, Callable[[Document], None]] = {
    "only Always makes it a sidecar": _set(_sidecar, "restartPolicy", "Alway"),
    "nothing waits for it": lambda pod: _sidecar(pod).pop("startupProbe"),
    "restartPolicy 'Allways' is none": _set(lambda pod: pod["spec"], "restartPolicy", "Allways"),
    "'2 GB' is no quantity": _set(lambda pod: _engine(pod)["resources"]["limits"], "memory", "2 GB"),
    "requests more memory than its limit": _set(lambda pod: _engine(pod)["resources"]["limits"], "memory", "1Gi"),
    "which is no volume of the pod": lambda pod: _engine(pod)["volumeMounts"].append({"name": "x", "mountPath": "/x"}),
    "nobody mounts volume 'x'": lambda pod: pod["spec"]["volumes"].append({"name": "x", "emptyDir": {}}),
    "could write to the models": lambda pod: [m.pop("readOnly", None) for m in _sidecar(pod)["volumeMounts"]],
    "names a host in its image": _set(_engine, "image", "example.org/engine"),
    "ballast has no command ['weight']": _set(_sidecar, "args", ["weight", "/models/model"]),
    "ballast wait model --timout 0": lambda pod: _set(
        lambda p: _sidecar(p)["startupProbe"]["exec"], "command", ["ballast", "wait", "model", "--timout", "0"]
    )(pod),
    "which is not known to be in": lambda pod: _set(
        lambda p: _sidecar(p)["livenessProbe"]["exec"], "command", ["curl", "localhost"]
    )(pod),
    "asks port 'htpp'": lambda pod: _set(lambda p: _engine(p)["startupProbe"]["httpGet"], "port", "htpp")(pod),
    "hostIPC is set": _set(lambda pod: pod["spec"], "hostIPC", True),
    "runs as a user other than root": lambda pod: pod["spec"]["securityContext"].pop("runAsNonRoot"),
    "has no seccomp profile": lambda pod: pod["spec"]["securityContext"].pop("seccompProfile"),
    "is of a kind that 'restricted' refuses": lambda pod: pod["spec"]["volumes"].append(
        {"name": "x", "hostPath": {"path": "/x"}}
    ),
    "may gain privileges": lambda pod: _engine(pod)["securityContext"].pop("allowPrivilegeEscalation"),
    "keeps capabilities": lambda pod: _engine(pod)["securityContext"].pop("capabilities"),
    "may write to its root": lambda pod: _engine(pod)["securityContext"].pop("readOnlyRootFilesystem"),
    "there must be one for all": lambda pod: _engine(pod)["securityContext"].update(runAsUser=1000),
    "has no memory limit": lambda pod: _engine(pod)["resources"]["limits"].pop("memory"),
    "has no memory emptyDir at /dev/shm": lambda pod: [
        v["emptyDir"].pop("medium") for v in pod["spec"]["volumes"] if v["name"] == "shm"
    ],
    "is less than shm": lambda pod: [
        v["emptyDir"].update(sizeLimit="1Ti") for v in pod["spec"]["volumes"] if v["name"] == "shm"
    ],
}


@pytest.mark.parametrize("sentence", BREACHES)
def test_each_rule_finds_its_breach(sentence: str) -> None:
    documents = copy.deepcopy(load((RENDERED / "cpu.yaml").read_text()))
    (pod,) = [pod for document in documents for _, pod in lint.pods(document)]
    BREACHES[sentence](pod)
    assert any(sentence in problem for problem in lint.problems(documents)), lint.problems(documents)


@pytest.mark.parametrize(
    ("sentence", "change"),
    [
        ("has no template", lambda pod: pod["spec"]["resourceClaims"][0].update(resourceClaimTemplateName="x")),
        ("which the pod does not have", lambda pod: _engine(pod)["resources"]["claims"].append({"name": "x"})),
        ("do not share a claim", lambda pod: pod["spec"]["initContainers"][1]["resources"].pop("claims")),
        ("which handles need", lambda pod: pod["spec"].pop("shareProcessNamespace")),
    ],
)
def test_each_rule_of_claims(sentence: str, change: Callable[[Document], None]) -> None:
    documents = load((RENDERED / "gpu-dra.yaml").read_text())
    (pod,) = [pod for document in documents for _, pod in lint.pods(document)]
    change(pod)
    assert any(sentence in problem for problem in lint.problems(documents)), lint.problems(documents)


@pytest.mark.parametrize(
    ("sentence", "where", "change"),
    [
        ("restartPolicy: 'Never' is not one of", "leaderWorkerTemplate", {"restartPolicy": "Never"}),
        ("restartPolicy: None is not one of", "leaderWorkerTemplate", {"restartPolicy": None}),  # if it were written null
        ("size: '2' is not of type 'integer'", "leaderWorkerTemplate", {"size": "2"}),
        ("size: 0 is less than the minimum", "leaderWorkerTemplate", {"size": 0}),
        ("('workers' was unexpected)", "leaderWorkerTemplate", {"workers": 2}),
        ("('restartPolicy' was unexpected)", "", {"restartPolicy": "None"}),
        ("startupPolicy: 'Ready' is not one of", "", {"startupPolicy": "Ready"}),
        ("'type' is a required property", "", {"rolloutStrategy": {}}),
        ("'subdomainPolicy' is a required property", "", {"networkConfig": {}}),
        ("('selector' was unexpected)", "leaderWorkerTemplate leaderTemplate", {"selector": {}}),
        ("5 pods cannot be put into groups of 3", "leaderWorkerTemplate", {"size": 5, "subGroupPolicy": {"subGroupSize": 3}}),
    ],
)
def test_each_rule_of_sets(sentence: str, where: str, change: Document) -> None:
    documents = load((RENDERED / "multi-node.yaml").read_text())
    (one,) = [document for document in documents if document["kind"] == "LeaderWorkerSet"]
    place = one["spec"]
    for key in where.split():
        place = place[key]
    place.update(change)
    assert any(sentence in problem for problem in lint.problems(documents)), lint.problems(documents)


@pytest.mark.parametrize(
    ("sentence", "change"),
    [
        ("uses $(LWS_NODE_RANK), which nobody sets", lambda pod: _engine(pod)["args"].append("$(LWS_NODE_RANK)")),
        ("uses $(NODE), which nobody sets", lambda pod: _sidecar(pod).pop("env")),
        (
            "from label worker-index, which nobody sets",
            lambda pod: _sidecar(pod)["env"][0]["valueFrom"]["fieldRef"].update(fieldPath="metadata.labels['worker-index']"),
        ),
    ],
)
def test_each_rule_of_a_sets_pods(sentence: str, change: Callable[[Document], None]) -> None:
    documents = load((RENDERED / "multi-node.yaml").read_text())
    change(next(pod for document in documents for _, pod in lint.pods(document)))
    assert any(sentence in problem for problem in lint.problems(documents)), lint.problems(documents)


def test_a_set_has_its_name_for_itself() -> None:
    documents = load((RENDERED / "multi-node.yaml").read_text())
    (service,) = [document for document in documents if document["kind"] == "Service"]
    service["metadata"]["name"] = "engine"
    (problem,) = lint.problems(documents)
    assert "a service has its name" in problem


def test_selectors_select() -> None:
    documents = load((RENDERED / "cpu.yaml").read_text())
    for document in documents:
        if document["kind"] == "Service":
            document["spec"]["selector"] = {"app": "x"}
    assert lint.problems(documents) == ["Service engine selects no pod"]


def test_sizes_come_from_one_place(tmp_path: Path) -> None:
    """An overlay of one's own, word for word as docs/kubernetes.md has it, on another overlay."""
    blocks = (ROOT / "docs" / "kubernetes.md").read_text().split("```yaml\n")[1:]
    for block in blocks:
        text = block.partition("```")[0]
        path = tmp_path / text.partition("\n")[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "ballast" / "deploy").mkdir(parents=True)
    shutil.copytree(ROOT / "deploy" / "kubernetes", tmp_path / "ballast" / "deploy" / "kubernetes")
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is missing: install it (the client alone; no cluster is needed)")
    out = subprocess.run([kubectl, "kustomize", str(tmp_path / "mine")], capture_output=True, text=True, check=True).stdout
    (pod,) = [pod for document in load(out) for _, pod in lint.pods(document)]
    (shm,) = [volume["emptyDir"] for volume in pod["spec"]["volumes"] if volume["name"] == "shm"]
    assert shm["sizeLimit"] == "40Gi"
    assert {part["memory"] for part in _sidecar(pod)["resources"].values()} == {"41Gi"}
    assert _sidecar(pod)["image"] == "my/ballast-sidecar:0.1.0"
    assert "ballast-size" not in out


def test_the_arithmetic_of_many_nodes() -> None:
    """The table in the documentation is what the script prints."""
    out = subprocess.run([sys.executable, str(ROOT / "bench" / "nodes.py")], capture_output=True, text=True, check=True).stdout
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    assert page.partition("<!-- nodes: begin -->\n")[2].partition("<!-- nodes: end -->")[0] == out
    assert all(f"{count} nodes" in out for count in (8, 64, 512))


def test_a_node_holds_its_own_files_only(pool_name: str, tmp_path: Path) -> None:
    """Two nodes of an engine: each sidecar has links to half of the files, each rank reads the whole checkpoint."""
    model = tmp_path / "model"
    model.mkdir()
    names = [f"model-{number:05}-of-00006.safetensors" for number in range(1, 7)]
    for seed, name in enumerate(names):
        checkpoints.write(model / name, {f"layer.{seed}": checkpoints.entry("F32", (32, 32), seed)}, {"format": "pt"})
    (model / "config.json").write_text("{}")
    index = {"weight_map": {f"layer.{seed}": name for seed, name in enumerate(names)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    script = [sys.executable, str(ROOT / "deploy" / "kubernetes" / "split.py"), str(model), "2"]
    parts = subprocess.run(script, capture_output=True, text=True, check=True).stdout.split()
    program = (
        "import glob, hashlib, json, sys\n"
        "from safetensors.torch import load_file\n"
        "files = {}\n"
        "for path in sorted(glob.glob(sys.argv[1] + '/*.safetensors')):\n"
        "    for name, tensor in load_file(path).items():\n"
        "        files[name] = hashlib.sha256(tensor.numpy().tobytes()).hexdigest()\n"
        "print(json.dumps(files))\n"
    )
    plain = subprocess.run(
        [sys.executable, "-c", program, model], env=environment(), capture_output=True, text=True, check=True
    )
    for node, own in enumerate((names[:4], names[2:])):
        part = Path(parts[node])
        assert sorted(path.name for path in part.glob("*.safetensors")) == own
        with Sidecar(pool_name, part, args=["--name", "model"]) as sidecar:
            sidecar.ready("model")
            done = ballast("run", "--pool", pool_name, "--", sys.executable, "-c", program, model)
        assert json.loads(done.stdout) == json.loads(plain.stdout) and len(json.loads(plain.stdout)) == 6
        assert "model comes from memory" in done.stderr and "loading without Ballast" in done.stderr


@pytest.mark.parametrize("options", [[], ["--no-ports"]])
def test_the_pod_for_podman(options: list[str]) -> None:
    """What deploy/podman/kube.py makes of the overlay `cpu`. tests/containers runs it."""
    script = [sys.executable, str(ROOT / "deploy" / "podman" / "kube.py"), *options, "/run/ballast"]
    rendered = (RENDERED / "cpu.yaml").read_text()
    made = subprocess.run(script, input=rendered, capture_output=True, text=True, check=True)
    (pod,) = load(made.stdout)
    kubernetes_validate.validate(pod, VERSIONS[0], strict=True)
    assert [one["name"] for one in pod["spec"]["containers"]] == ["sidecar", "engine"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    # podman takes an emptyDir's name for that of a volume of its own, which may be anybody's.
    assert {name for name, volume in volumes.items() if "emptyDir" in volume} == {"engine-models", "engine-tmp"}
    assert volumes["shm"]["hostPath"]["path"] == "/run/ballast"
    for one in lint.containers(pod):
        assert {mount["name"] for mount in one["volumeMounts"]} <= volumes.keys()
        assert one["securityContext"]["runAsUser"] == 65532 and "restartPolicy" not in one
    ports = [port for one in lint.containers(pod) for port in one.get("ports", [])]
    assert [(port["hostIP"], port["hostPort"]) for port in ports] == ([] if options else [("127.0.0.1", 8000)])


def test_versions_are_ours() -> None:
    for document in load((RENDERED / "cpu.yaml").read_text()):
        for _, pod in lint.pods(document):
            assert {one["image"].partition(":")[2] for one in lint.containers(pod)} == {__version__}
    assert f'version="{__version__}"' in (ROOT / "Containerfile").read_text()


def test_nothing_names_a_registry() -> None:
    for path in [ROOT / "Containerfile", ROOT / "compose.yaml", *(ROOT / "deploy").rglob("*")]:
        if path.is_file() and path.suffix != ".txt":
            for word in path.read_text().split():
                assert not word.startswith(("docker.", "quay.", "ghcr.", "registry.", "nvcr.", "gcr.")), (path, word)
    assert os.listdir(RENDERED)
