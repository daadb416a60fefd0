"""The files of examples/deploy use options, routes and ports that there are, and are valid."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlflow_llm.serving.cli.serve.command import serve
from mlflow_llm.serving.http.route import Listener
from mlflow_llm.serving.http.routes import ROUTES

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "examples/deploy"
OPTIONS = {name for one in serve.params for name in (*one.opts, *one.secondary_opts)}
KUBERNETES = "1.37"
ON_PROBES = {route.path for route in ROUTES if route.listener is not Listener.GATEWAY}


def objects() -> dict[str, Any]:
    """Return the Kubernetes objects of the rendered chart by kind; of the services, the one of the probes."""
    found = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {one["kind"]: one for one in found if one is not None}


def container() -> Any:
    (found,) = objects()["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    return found


def commands() -> Iterator[tuple[str, str]]:
    """Yield the texts that have options of ``mlflow-llm serve``."""
    containerfile = (DEPLOY / "Containerfile").read_text()
    yield "Containerfile", re.findall(r"^ENTRYPOINT (.*)", containerfile, re.M)[0]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    yield "compose.yaml", " ".join(compose["services"]["server"]["command"])
    yield "kubernetes.yaml", " ".join(container()["args"])
    yield "mlflow-llm.service", re.findall(r"^ExecStart=(.*)", (DEPLOY / "mlflow-llm.service").read_text(), re.M)[0]
    yield "values.yaml", re.findall(r"mlflow-llm serve, such as (.*)", (DEPLOY / "chart/values.yaml").read_text())[0]


@pytest.mark.parametrize(("file", "text"), list(commands()), ids=lambda value: value.split()[0])
def test_options_exist(file: str, text: str) -> None:
    """Every option of ``mlflow-llm serve`` in the files is one that it has."""
    given = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", text)
    assert given, file
    assert set(given) <= OPTIONS


def test_probes_ask_routes_of_the_probe_listener() -> None:
    """Each probe asks a route of the probe port, as Prometheus does; the service for clients does not expose it."""
    probes = [container()[name] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    paths = {probe["httpGet"]["path"] for probe in probes}
    assert paths == {"/ready", "/ping"}
    assert paths | {"/metrics"} <= ON_PROBES
    assert {probe["httpGet"]["port"] for probe in probes} == {"probes"}
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    containerfile = (DEPLOY / "Containerfile").read_text()
    assert f'"--probe-port", "{ports["probes"]}"' in containerfile
    assert f"EXPOSE {ports['gateway']} {ports['probes']}" in containerfile
    (target,) = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"][0]["static_configs"]
    assert target["targets"] == [f"server:{ports['probes']}"]
    health = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]["healthcheck"]["test"]
    assert f"127.0.0.1:{ports['probes']}/ready" in health[-1]


def test_a_pod_drains_before_it_is_killed() -> None:
    """A pod, a container and a unit have more time to end than running requests have to finish."""
    drain = int(container()["args"][container()["args"].index("--drain-timeout") + 1])
    pod = objects()["StatefulSet"]["spec"]["template"]["spec"]
    wait = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > drain + wait
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]
    assert int(compose["stop_grace_period"].removesuffix("s")) > int(compose["command"][-1])
    unit = (DEPLOY / "mlflow-llm.service").read_text()
    stop, timeout = re.findall(r"^TimeoutStopSec=(\d+)", unit, re.M)[0], re.findall(r"--drain-timeout (\d+)", unit)[0]
    assert int(stop) > int(timeout)


def test_objects_select_the_pods() -> None:
    """Services, the disruption budget, the autoscaler and the monitor are for the pods of the stateful set."""
    found = objects()
    assert set(found) == {"StatefulSet", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler", "ServiceMonitor"}
    labels = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert (
        found["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == found["StatefulSet"]["metadata"]["name"]
    )
    wanted = found["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= found["Service"]["metadata"]["labels"].items()
    (port,) = found["ServiceMonitor"]["spec"]["endpoints"]
    assert port["port"] in {one["name"] for one in found["Service"]["spec"]["ports"]}


def test_files_that_compose_mounts_are_there() -> None:
    """Each file that a service of the compose file mounts exists, the dashboard included."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounted = [entry.split(":")[0] for one in services.values() for entry in one.get("volumes", ())]
    files = [name for name in mounted if name.startswith(("./", "../"))]
    assert len(files) == 4
    assert all((DEPLOY / name).is_file() for name in files)


def test_compose_accepts_its_file() -> None:
    """The compose file is valid to the program itself (where it is installed), and names what must be given."""
    program = shutil.which("docker-compose")
    if program is None:
        pytest.skip("docker-compose is not installed")
    command = [program, "-f", str(DEPLOY / "compose.yaml"), "config"]
    given = {"PATH": "/usr/bin:/bin", "MODEL": "/models/a", "DATABASE_PASSWORD": "x"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=given)
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == {"server", "database", "prometheus", "grafana"}
    refused = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**given, "DATABASE_PASSWORD": ""}
    )
    assert refused.returncode != 0
    assert "DATABASE_PASSWORD" in refused.stderr


def test_prometheus_accepts_its_file() -> None:
    """The configuration of Prometheus is valid to its own checker (where Prometheus is installed)."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    done = subprocess.run(
        [promtool, "check", "config", str(DEPLOY / "prometheus.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def rendered() -> list[Any]:
    return [one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()) if one is not None]


def test_the_rendered_chart_is_of_this_chart() -> None:
    """kubernetes.yaml names the hash of the chart that it was rendered from, so that neither changes without the
    other."""
    chart = DEPLOY / "chart"
    digest = hashlib.sha256()
    for path in sorted(path for path in chart.rglob("*") if path.is_file()):
        digest.update(path.relative_to(chart).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    line = f"# chart {digest.hexdigest()[:16]}"
    assert line in (DEPLOY / "kubernetes.yaml").read_text().splitlines(), f"render it again, and write {line!r}"


def test_helm_accepts_the_chart() -> None:
    """The chart passes Helm's linter, and kubernetes.yaml is what Helm makes of it (where Helm is installed)."""
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("helm is not installed")
    run = {"check": True, "capture_output": True, "text": True}
    subprocess.run([helm, "lint", "--strict", str(DEPLOY / "chart")], **run)  # type: ignore[call-overload]
    made = subprocess.run([helm, "template", "assistant", str(DEPLOY / "chart")], **run)  # type: ignore[call-overload]
    assert [one for one in yaml.safe_load_all(made.stdout) if one is not None] == rendered()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("found", rendered(), ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_kubernetes_accepts_the_objects(found: dict[str, Any]) -> None:
    """Each object has no field that Kubernetes does not know, and each field a value that it takes; the monitor is of
    Prometheus' operator, whose types are not Kubernetes' own."""
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed (pip)")
    if found["apiVersion"].startswith("monitoring.coreos.com/"):
        with pytest.raises(validator.SchemaNotFoundError):
            validator.validate(found, KUBERNETES, strict=True)
        return
    validator.validate(found, KUBERNETES, strict=True)
    with pytest.raises(validator.ValidationError):
        validator.validate({**found, "sepc": {}}, KUBERNETES, strict=True)


def test_the_unit_is_valid(tmp_path: Path) -> None:
    """systemd finds nothing to say about the unit (where it is installed)."""
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "mlflow-llm.service"
    unit.write_text((DEPLOY / "mlflow-llm.service").read_text().replace("/opt/llm/bin/mlflow-llm", sys.executable))
    done = subprocess.run([verify, "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
