"""Makes a Pod that `podman kube play` runs out of a rendered overlay: `python3 kube.py DIRECTORY <rendered.yaml >pod.yaml`.

    mkdir -p /run/ballast && mount -t tmpfs -o size=2g,mode=1777 tmpfs /run/ballast
    kubectl kustomize deploy/kubernetes/overlays/cpu | python3 deploy/podman/kube.py /run/ballast >pod.yaml
    podman kube play pod.yaml

podman knows no native sidecars and no emptyDir in memory. So, and only so, the Pod differs from Kubernetes' own:

- the sidecar is an ordinary container beside the engine;
- nothing makes the engine wait for it; so the engine runs with BALLAST_MODE=require, ends as long as the pool is not there, and
  is started again by podman;
- podman's restart policy is the whole pod's, init containers and all: it is OnFailure;
- the memory volume is DIRECTORY, where you have mounted a tmpfs, at /dev/shm in both;
- an emptyDir becomes a volume of podman's by its name, and would be one that is there already: the pod's name comes before it;
- probes are left away: without systemd podman does not run them. Ask `podman exec POD-sidecar ballast wait`.

Ports are mapped on 127.0.0.1 only; with --no-ports none is, as --network=none wants it.
"""

from __future__ import annotations

import sys

try:
    import yaml
except ImportError:
    sys.exit("kube.py needs PyYAML: pip install pyyaml (Debian: apt install python3-yaml)")

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
UNKNOWN_TO_PODMAN = ("fsGroupChangePolicy",)


def transform(documents, directory, publish=True):
    """The Pod of the first Deployment in `documents`. Without `publish` no port is mapped: for --network=none."""
    deployments = [one for one in documents if one and one["kind"] == "Deployment"]
    if not deployments:
        sys.exit("there is no Deployment in the input: pipe 'kubectl kustomize deploy/kubernetes/overlays/cpu' into this")
    template = deployments[0]["spec"]["template"]
    spec = template["spec"]
    once = [one for one in spec.get("initContainers", []) if one.get("restartPolicy") != "Always"]
    sidecars = [one for one in spec.get("initContainers", []) if one.get("restartPolicy") == "Always"]
    user = {key: spec["securityContext"][key] for key in ("runAsUser", "runAsGroup") if key in spec["securityContext"]}
    for one in (*once, *sidecars, *spec["containers"]):
        one.pop("restartPolicy", None)
        for probe in PROBES:
            one.pop(probe, None)
        one["securityContext"] = {**one.get("securityContext", {}), **user}  # podman does not hand them down from the pod
        one["imagePullPolicy"] = "Never"
        if not publish:
            one.pop("ports", None)
        for port in one.get("ports", []):
            port.update(hostPort=port["containerPort"], hostIP="127.0.0.1")
    for one in spec["containers"]:
        one.setdefault("env", []).append({"name": "BALLAST_MODE", "value": "require"})
    renamed = {}
    for volume in spec["volumes"]:
        if (volume.get("emptyDir") or {}).get("medium") == "Memory":
            volume.clear()
            volume.update(name="shm", hostPath={"path": directory, "type": "Directory"})
        elif "emptyDir" in volume:
            renamed[volume["name"]] = f"{deployments[0]['metadata']['name']}-{volume['name']}"
            volume.update(name=renamed[volume["name"]], emptyDir={})
    for one in (*once, *sidecars, *spec["containers"]):
        for mount in one.get("volumeMounts", []):
            mount["name"] = renamed.get(mount["name"], mount["name"])
    for name in UNKNOWN_TO_PODMAN:
        spec["securityContext"].pop(name, None)
    spec.update(initContainers=once, containers=[*sidecars, *spec["containers"]], restartPolicy="OnFailure")
    metadata = {"name": deployments[0]["metadata"]["name"], "labels": template["metadata"]["labels"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


if __name__ == "__main__":
    arguments = [word for word in sys.argv[1:] if word != "--no-ports"]
    if len(arguments) != 1:
        sys.exit("usage: kube.py [--no-ports] DIRECTORY <rendered.yaml >pod.yaml; DIRECTORY is a mounted tmpfs")
    pod = transform(list(yaml.safe_load_all(sys.stdin)), arguments[0], publish="--no-ports" not in sys.argv)
    yaml.safe_dump(pod, sys.stdout, sort_keys=False)
