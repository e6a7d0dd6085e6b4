"""The Pod Security Standard `restricted` of Kubernetes 1.34, for pods of Linux. Pure."""

from collections.abc import Iterator
from typing import Any

_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"),
    *("projected", "secret"),
}
_SYSCTLS = {
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.tcp_syncookies"),
    *("net.ipv4.ping_group_range", "net.ipv4.ip_unprivileged_port_start"),
    *("net.ipv4.ip_local_reserved_ports", "net.ipv4.tcp_keepalive_time"),
    *("net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes"),
}
_SELINUX = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
Object = dict[str, Any]


def violations(pod: Object) -> set[str]:
    """Return the rules that a pod, or a template of pods, violates, each with the place."""
    spec = pod["spec"]
    own = spec.get("securityContext") or {}
    found = {name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name)}
    for volume in spec.get("volumes") or ():
        if not volume.keys() - {"name"} <= _VOLUMES:
            found.add(f"volume {volume['name']}")
    for sysctl in own.get("sysctls") or ():
        if sysctl["name"] not in _SYSCTLS:
            found.add(f"sysctl {sysctl['name']}")
    for name, profile in ((pod.get("metadata") or {}).get("annotations") or {}).items():
        if name.startswith(_APPARMOR) and profile == "unconfined":
            found.add("AppArmor")
    found |= {f"pod: {rule}" for rule in _of_context(own)}
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in spec.get(kind) or ():
            found |= {f"{container['name']}: {rule}" for rule in _of_container(container, own)}
    return found


def _of_container(container: Object, of_pod: Object) -> Iterator[str]:
    context = container.get("securityContext") or {}
    yield from _of_context(context)
    if any(port.get("hostPort") for port in container.get("ports") or ()):
        yield "hostPort"
    if _has_host(container):
        yield "the host of a probe"
    if context.get("privileged"):
        yield "privileged"
    if context.get("procMount", "Default") != "Default":
        yield "procMount"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation"
    both = {**of_pod, **context}
    if both.get("runAsNonRoot") is not True:
        yield "runAsNonRoot"
    if both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "seccompProfile"
    capabilities = context.get("capabilities") or {}
    if "ALL" not in capabilities.get("drop", ()):
        yield "capabilities are kept"
    if set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
        yield "capabilities are added"


def _of_context(context: Object) -> Iterator[str]:
    """Yield the violations that a pod's context and a container's have in common."""
    if context.get("runAsUser") == 0:
        yield "runAsUser"
    if context.get("seccompProfile", {}).get("type") == "Unconfined":
        yield "seccompProfile"
    if context.get("appArmorProfile", {}).get("type") == "Unconfined":
        yield "AppArmor"
    if (context.get("windowsOptions") or {}).get("hostProcess"):
        yield "hostProcess"
    selinux = context.get("seLinuxOptions") or {}
    if selinux.get("type", "") not in _SELINUX or selinux.get("user") or selinux.get("role"):
        yield "seLinuxOptions"


def _has_host(container: Object) -> bool:
    handlers = [container.get(f"{name}Probe") for name in ("liveness", "readiness", "startup")]
    handlers += (container.get("lifecycle") or {}).values()
    return any(
        (handler or {}).get(way, {}).get("host")
        for handler in handlers
        for way in ("httpGet", "tcpSocket")
    )
