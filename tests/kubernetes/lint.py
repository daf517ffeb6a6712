"""What the schemas of Kubernetes let pass and would go wrong: each rule yields a sentence for each breach.

Takes the documents as kustomize renders them. `problems` is the whole; it walks every pod template that it finds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import typer.main
import yaml

from sidecar import cli

Document = dict[str, Any]

_QUANTITY = re.compile(r"(0|[1-9][0-9]*)(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?\Z")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    unit: 1 << (10 * power) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti"), 1)
}
_RESTRICTED_VOLUMES = frozenset(
    ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret")
)
_HOST = ("hostNetwork", "hostPID", "hostIPC")
# What Kubernetes' own schemas do not have.
_SET = jsonschema.Draft202012Validator(yaml.safe_load(Path(__file__).with_name("leaderworkerset.yaml").read_text()))
# What the controller gives to each container of a set's pods, and to the pods as labels.
_SET_VARIABLES = frozenset(("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"))
_SET_LABELS = frozenset(
    f"leaderworkerset.sigs.k8s.io/{name}" for name in ("name", "group-index", "worker-index", "group-key")
)
SIDECAR_IMAGES = ("ballast-sidecar", "ballast-sidecar-cuda")


def pods(document: Document) -> Iterator[tuple[str, Document]]:
    """Each pod template of a document: a name for it, and the template (metadata and spec)."""
    kind, spec = document["kind"], document.get("spec", {})
    if kind in ("Deployment", "StatefulSet", "DaemonSet", "Job"):
        yield f"{kind} {document['metadata']['name']}", spec["template"]
    elif kind == "LeaderWorkerSet":
        for part in ("leaderTemplate", "workerTemplate"):
            yield f"{kind} {document['metadata']['name']}, {part}", spec["leaderWorkerTemplate"][part]
    elif kind == "Pod":
        yield f"Pod {document['metadata']['name']}", document


def containers(pod: Document) -> list[Document]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def quantity(text: object) -> float:
    """Bytes, or a count. Raises ValueError."""
    found = _QUANTITY.match(str(text))
    if not found:
        raise ValueError(f"{text!r} is no quantity")
    whole, fraction, unit = found.groups()
    if unit == "m":
        return float(whole) / 1000
    return float(f"{whole}{fraction or ''}") * _UNITS[unit or ""]


def problems(documents: list[Document]) -> list[str]:
    found = []
    templates = [pair for document in documents for pair in pods(document)]
    for name, pod in templates:
        for rule in (_restarts, _quantities, _mounts, _images, _commands, _ports, _restricted, _memory, _claims):
            found += [f"{name}: {text}" for text in rule(pod, documents)]
    found += _selectors(documents, [pod for _, pod in templates])
    for document in documents:
        if document["kind"] == "LeaderWorkerSet":
            found += [f"LeaderWorkerSet {document['metadata']['name']}: {text}" for text in _set(document, documents)]
    found += [] if templates else ["there is no pod in it"]
    return found


def _restarts(pod: Document, _: list[Document]) -> Iterator[str]:
    if pod["spec"].get("restartPolicy", "Always") not in ("Always", "OnFailure", "Never"):
        yield f"restartPolicy {pod['spec']['restartPolicy']!r} is none"
    for one in pod["spec"].get("initContainers", []):
        policy = one.get("restartPolicy")
        if policy not in (None, "Always"):
            yield f"init container {one['name']} has restartPolicy {policy!r}, and only Always makes it a sidecar"
        if policy == "Always" and "startupProbe" not in one:
            yield f"sidecar {one['name']} has no startup probe, so nothing waits for it"
    for one in pod["spec"]["containers"]:
        if "restartPolicy" in one:
            yield f"container {one['name']} has a restartPolicy of its own"


def _quantities(pod: Document, _: list[Document]) -> Iterator[str]:
    def check(where: str, text: object) -> Iterator[str]:
        try:
            quantity(text)
        except ValueError as error:
            yield f"{where}: {error}"

    for one in containers(pod):
        resources = one.get("resources", {})
        for part in ("requests", "limits"):
            for name, text in resources.get(part, {}).items():
                yield from check(f"{one['name']}, {part} of {name}", text)
        for name, text in resources.get("requests", {}).items():
            limit = resources.get("limits", {}).get(name)
            if limit is not None and not list(check("", text)) and not list(check("", limit)):
                if quantity(text) > quantity(limit):
                    yield f"{one['name']} requests more {name} than its limit"
    for volume in pod["spec"].get("volumes", []):
        if "sizeLimit" in (volume.get("emptyDir") or {}):
            yield from check(f"volume {volume['name']}", volume["emptyDir"]["sizeLimit"])


def _mounts(pod: Document, _: list[Document]) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", [])}
    mounted = set()
    for one in containers(pod):
        paths = [mount["mountPath"] for mount in one.get("volumeMounts", [])]
        if len(set(paths)) != len(paths):
            yield f"{one['name']} mounts two volumes at one place"
        for mount in one.get("volumeMounts", []):
            mounted.add(mount["name"])
            volume = volumes.get(mount["name"])
            if volume is None:
                yield f"{one['name']} mounts {mount['name']!r}, which is no volume of the pod"
            elif (volume.get("persistentVolumeClaim") or {}).get("readOnly") and not mount.get("readOnly"):
                yield f"{one['name']} mounts {mount['name']!r} writable, and its claim is read-only"
            if mount["mountPath"].startswith("/models") and not mount.get("readOnly"):
                yield f"{one['name']} could write to the models"
    for name in volumes.keys() - mounted:
        yield f"nobody mounts volume {name!r}"


def _images(pod: Document, _: list[Document]) -> Iterator[str]:
    for one in containers(pod):
        first, slash, _rest = one["image"].partition("/")
        if slash and ("." in first or ":" in first or first == "localhost"):
            yield f"{one['name']} names a host in its image: that is the cluster's affair"


def parses(arguments: list[str]) -> str:
    """What is wrong with a command line of `ballast`; "" if it would be understood."""
    group: Any = typer.main.get_command(cli.app)
    command = group.commands.get(arguments[0]) if arguments else None
    if command is None:
        return f"ballast has no command {arguments[:1]}"
    try:
        command.make_context(arguments[0], [re.sub(r"\$\([A-Z_]+\)", "0", word) for word in arguments[1:]])
    except Exception as error:
        what = error.format_message() if hasattr(error, "format_message") else str(error)
        return f"ballast {' '.join(arguments)}: {what}"
    return ""


def _commands(pod: Document, _: list[Document]) -> Iterator[str]:
    for one in containers(pod):
        ours = one["image"].split(":")[0] in SIDECAR_IMAGES
        lines = [one["args"]] if ours and "args" in one and "command" not in one else []
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            command = one.get(probe, {}).get("exec", {}).get("command")
            if command is not None and (not ours or command[0] != "ballast"):
                yield f"{probe} of {one['name']} calls {command[0]}, which is not known to be in {one['image']}"
            elif command is not None:
                lines.append(command[1:])
        yield from filter(None, map(parses, lines))


def _ports(pod: Document, _: list[Document]) -> Iterator[str]:
    for one in containers(pod):
        known = {port[key] for port in one.get("ports", []) for key in ("name", "containerPort") if key in port}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            port = one.get(probe, {}).get("httpGet", {}).get("port")
            if port is not None and port not in known:
                yield f"{probe} of {one['name']} asks port {port!r}, which it does not have"


def _restricted(pod: Document, _: list[Document]) -> Iterator[str]:
    """The restricted Pod Security Standard, and beyond it: root read-only, one user, memory limits."""
    spec = pod["spec"]
    security = spec.get("securityContext", {})
    for name in _HOST:
        if spec.get(name):
            yield f"{name} is set"
    if security.get("runAsNonRoot") is not True or not security.get("runAsUser"):
        yield "does not say that it runs as a user other than root, and as which"
    if security.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "has no seccomp profile"
    for volume in spec.get("volumes", []):
        kinds = {key for key, value in volume.items() if key != "name" and value is not None}
        if not kinds <= _RESTRICTED_VOLUMES:
            yield f"volume {volume['name']} is of a kind that 'restricted' refuses"
    for one in containers(pod):
        own = one.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield f"{one['name']} may gain privileges"
        if own.get("capabilities", {}).get("drop") != ["ALL"] or own.get("capabilities", {}).get("add"):
            yield f"{one['name']} keeps capabilities"
        if own.get("readOnlyRootFilesystem") is not True:
            yield f"{one['name']} may write to its root"
        if {"runAsUser", "runAsGroup", "runAsNonRoot", "seccompProfile"} & own.keys():
            yield f"{one['name']} has a user of its own: there must be one for all"
        if "memory" not in one.get("resources", {}).get("limits", {}):
            yield f"{one['name']} has no memory limit"


def _memory(pod: Document, _: list[Document]) -> Iterator[str]:
    """Shared memory: in both containers, and paid for by the sidecar."""
    sidecars = [one for one in pod["spec"].get("initContainers", []) if one.get("restartPolicy") == "Always"]
    if [one["name"] for one in sidecars][:1] != ["sidecar"]:
        yield "has no native sidecar of that name, before all others"
        return
    volumes = {volume["name"]: volume.get("emptyDir") or {} for volume in pod["spec"]["volumes"]}
    in_memory = {name: volume for name, volume in volumes.items() if volume.get("medium") == "Memory"}
    for one in (*sidecars, *pod["spec"]["containers"]):
        mounts = {mount["mountPath"]: mount["name"] for mount in one.get("volumeMounts", [])}
        if mounts.get("/dev/shm") not in in_memory:
            yield f"{one['name']} has no memory emptyDir at /dev/shm"
    for name, volume in in_memory.items():
        if "sizeLimit" not in volume:
            yield f"volume {name} has no size"
            continue
        try:
            needed = 1.01 * quantity(volume["sizeLimit"]) + (128 << 20)
            for part in ("requests", "limits"):
                if quantity(sidecars[0].get("resources", {}).get(part, {}).get("memory", "0")) < needed:
                    yield f"the sidecar's memory ({part}) is less than {name}, 1 % and 128Mi"
        except ValueError:
            pass  # said by the rule of quantities


def _claims(pod: Document, documents: list[Document]) -> Iterator[str]:
    templates = {d["metadata"]["name"] for d in documents if d["kind"] == "ResourceClaimTemplate"}
    known = {claim["name"]: claim for claim in pod["spec"].get("resourceClaims", [])}
    for claim in known.values():
        if claim.get("resourceClaimTemplateName") not in templates:
            yield f"claim {claim['name']} has no template"
    asking = {one["name"]: {c["name"] for c in one.get("resources", {}).get("claims", [])} for one in containers(pod)}
    for name, claims in asking.items():
        for claim in claims - known.keys():
            yield f"{name} asks for claim {claim!r}, which the pod does not have"
    if known and not asking.get("holder", set()) & asking.get("engine", set()):
        yield "holder and engine do not share a claim"
    if known and not pod["spec"].get("shareProcessNamespace"):
        yield "holder and engine do not see each other's processes, which handles need"


def _set(document: Document, documents: list[Document]) -> Iterator[str]:
    """What its own schema says, which is no part of Kubernetes', and that its pods use what its controller gives them."""
    for error in _SET.iter_errors(document):
        yield f"{error.json_path}: {error.message}"
    size = document["spec"]["leaderWorkerTemplate"].get("size", 1)
    group = document["spec"]["leaderWorkerTemplate"].get("subGroupPolicy", {}).get("subGroupSize", 1)
    if isinstance(size, int) and isinstance(group, int) and group > 0 and size % group and (size - 1) % group:
        yield f"{size} pods cannot be put into groups of {group}"
    if any(d["kind"] == "Service" and d["metadata"]["name"] == document["metadata"]["name"] for d in documents):
        yield "a service has its name, which is that of the service that its controller makes"
    for name, pod in pods(document):
        for one in containers(pod):
            own = {variable["name"] for variable in one.get("env", [])}
            words = " ".join([*one.get("command", []), *one.get("args", [])])
            for variable in set(re.findall(r"\$\(([A-Za-z_]+)\)", words)) - own - _SET_VARIABLES:
                yield f"{name}: {one['name']} uses $({variable}), which nobody sets"
            for variable in one.get("env", []):
                path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
                label = re.match(r"metadata\.labels\['(.*)'\]\Z", path)
                if label and label[1] not in _SET_LABELS | pod["metadata"].get("labels", {}).keys():
                    yield f"{name}: {one['name']} takes {variable['name']} from label {label[1]}, which nobody sets"


def _selectors(documents: list[Document], templates: list[Document]) -> Iterator[str]:
    labels = [pod.get("metadata", {}).get("labels", {}) for pod in templates]
    for document in documents:
        selector = document.get("spec", {}).get("selector")
        if isinstance(selector, dict):
            wanted = selector.get("matchLabels", selector)
            if not any(wanted.items() <= one.items() for one in labels):
                yield f"{document['kind']} {document['metadata']['name']} selects no pod"
