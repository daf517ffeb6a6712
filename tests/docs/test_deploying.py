"""The pages on deploying say what is so: each command of theirs that can be checked without running it is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.kubernetes.lint import parses

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docker-compose", "podman", "kubernetes", "injection", "who-pays-for-memory", "gpu-in-two-containers")


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_are_there(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        assert (ROOT / "docs" / target).exists(), target
    for path in re.findall(r"\b(deploy/[a-z0-9/_.-]+[a-z0-9]|bench/[a-z]+\.py)", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_ours_would_be_understood(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text().replace("\\\n", " ")
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            for image in ("ballast", "ballast-sidecar"):
                if image in words and words[0] in ("docker", "podman", "ballast") and "-t" not in words:
                    arguments = words[words.index(image) + 1 :]
                    assert not arguments or arguments[0] == "ballast" or parses(arguments) == "", line


def test_the_variables_are_those_of_compose() -> None:
    """Each in the table, with its default."""
    page = (ROOT / "docs" / "docker-compose.md").read_text()
    text = (ROOT / "compose.yaml").read_text()
    for name, default in re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", text):
        if name != "BALLAST_SIDECAR_IMAGE":
            assert f"`{name}`" in page, name
            assert default in ("model", "ballast-demo-engine") or f"`{default}`" in page, (name, default)


def test_both_ignore_files_are_one() -> None:
    assert (ROOT / ".dockerignore").read_text() == (ROOT / ".containerignore").read_text()


def test_compose_is_hardened_throughout() -> None:
    """Every service of ours; the engine of somebody else (vllm) may need more."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        if name != "vllm":
            assert service["read_only"] and service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "cap_add", "devices", "userns_mode"} & service.keys(), name
        if name in ("shm", "sidecar", "model", "shim"):
            assert service["network_mode"] == "none", name
        for mount in service.get("volumes", []):
            assert mount.endswith(":ro") or name == "shim", (name, mount)
    for name in ("sidecar", "engine", "vllm"):
        assert services[name]["ipc"] == services[name]["pid"] == "service:shm"
        assert "healthcheck" in services[name] and services[name]["restart"] == "unless-stopped", name
    for name in ("engine", "vllm"):
        assert {"BALLAST_POOL", "BALLAST_MODE"} <= services[name]["environment"].keys(), name
