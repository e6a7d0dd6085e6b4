"""OTLP over HTTP to a real server, which reads requests by OpenTelemetry's own messages."""

import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bootseer.profile.publish import collector
from bootseer.profile.publish.collector import send
from bootseer.profile.publish.endpoints import Endpoint, endpoints
from bootseer.profile.publish.otlp_messages import encode_groups
from bootseer.profile.publish.outgoing import TimelineLine, outgoing
from bootseer.timeline import Timeline
from bootseer.timeline.otlp import Value
from testbed.node import node_at
from testbed.servers.otlp_collector import MESSAGES, OtlpCollector, by_schema, running_collector
from testbed.waiting import pause, polling

_TOKEN = "very-secret-token"
_SILENT: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


@pytest.fixture
def server() -> Iterator[OtlpCollector]:
    with running_collector() as made:
        yield made


@pytest.fixture
def lines(tmp_path: Path) -> list[TimelineLine]:
    """Return a failed stage with a value of each type, and an open stage."""
    timeline = Timeline.start(tmp_path, job="j", submission="s", attempt=1, node="n", rank=-0)
    values: dict[str, Value] = {
        "text": "é",
        "yes": True,
        "no": False,
        "zero": 0,
        "less": -5,
        "part": 0.25,
    }
    timeline.span("load", values).end(error=OSError("no"))
    timeline.span("open")
    return list(outgoing([timeline.path]))


def _endpoint(server: OtlpCollector, signal: str = "traces", **more: str) -> Endpoint:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.port}", **more}
    return next(one for one in endpoints(environ) if one.signal == signal)


@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json"])
def test_spans_and_logs_are_what_the_schema_says(
    server: OtlpCollector, lines: list[TimelineLine], protocol: str
) -> None:
    more = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{_TOKEN},x-scope=a",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
    }
    for signal in ("traces", "logs"):
        found = send(_endpoint(server, signal, **more), lines, {})
        assert found == ({f"{signal} {lines[0].path}": lines[-1].end}, "")
    assert server.headers[0]["authorization"] == f"Bearer {_TOKEN}"
    assert server.headers[0]["x-scope"] == "a"
    (span,) = server.spans()
    assert (span.name, len(span.trace_id), len(span.span_id)) == ("load", 16, 8)
    assert span.parent_span_id == b""
    assert span.end_time_unix_nano > span.start_time_unix_nano > 1_700_000_000 * 10**9
    assert (span.status.code, span.status.message) == (2, "OSError: no")
    values = {one.key: one.value for one in span.attributes}
    assert values["text"].string_value == "é"
    assert [values[key].WhichOneof("value") for key in ("yes", "no")] == ["bool_value"] * 2
    assert [values[key].int_value for key in ("zero", "less")] == [0, -5]
    assert values["zero"].WhichOneof("value") == "int_value"
    assert values["part"].double_value == 0.25
    ((_, logs),) = [one for one in server.messages if one[0] == "/v1/logs"]
    records = [
        record
        for group in logs.resource_logs
        for scope in group.scope_logs
        for record in scope.log_records
    ]
    assert [one.body.string_value for one in records] == ["load", "open"]
    assert {one.event_name for one in records} == {"bootseer.stage.start"}
    resource = {
        one.key: one.value.string_value for one in logs.resource_logs[0].resource.attributes
    }
    assert (resource["service.name"], resource["bootseer.submission"]) == ("bootseer", "s")


def test_only_what_is_new_is_sent_in_bounded_requests(
    server: OtlpCollector, tmp_path: Path
) -> None:
    timeline = Timeline.start(tmp_path, job="j", submission="s", attempt=0, node="n", rank=0)
    for number in range(1100):
        timeline.note(f"stage {number}", 10**18, 1)
    timeline.event("bootseer.imports", "x" * 200_000)
    lines = list(outgoing([timeline.path]))
    found = send(_endpoint(server), lines, {})
    assert [len(message.resource_spans) for _, message in server.messages] == [512, 512, 76]
    assert send(_endpoint(server), lines, found.offsets) == ({}, "")
    timeline.note("last", 10**18, 1)
    send(_endpoint(server), list(outgoing([timeline.path])), found.offsets)
    assert [span.name for span in server.spans()][-2:] == ["stage 1099", "last"]
    # The long list of imports is no record for a collector.
    assert send(_endpoint(server, "logs"), lines, {}).problem == ""
    assert len(server.messages) == 4


def test_busy_servers_are_asked_again_when_they_say(
    server: OtlpCollector, lines: list[TimelineLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("bootseer.profile.publish.collector.time.sleep", waits.append)
    server.answers = [(503, {"Retry-After": "7"}), (429, {}), (502, {}), (504, {})]
    assert send(_endpoint(server), lines, {}).problem == ""
    assert len(server.spans()) == 1
    assert waits[0] == 7
    assert [0.5 <= wait <= 15 for wait in waits[1:]] == [True] * 3


@pytest.mark.parametrize("status", [401, 404, 500, 301])
def test_other_answers_end_the_round_and_lose_nothing(
    server: OtlpCollector, lines: list[TimelineLine], status: int
) -> None:
    server.answers = [(status, {"Location": "http://127.0.0.1:1/"})]
    headers = {"OTEL_EXPORTER_OTLP_HEADERS": f"authorization={_TOKEN}"}
    found = send(_endpoint(server, **headers), lines, {})
    assert f"answered {status}" in found.problem
    assert _TOKEN not in found.problem
    assert len(server.headers) == 1
    assert send(_endpoint(server), lines, found.offsets).problem == ""
    assert len(server.spans()) == 1


def test_a_refused_request_is_left_out(server: OtlpCollector, lines: list[TimelineLine]) -> None:
    server.answers = [(400, {})]
    found = send(_endpoint(server), lines, {})
    assert "are left out" in found.problem
    assert send(_endpoint(server), lines, found.offsets) == ({}, "")


def test_a_silent_server_costs_its_time_out(
    server: OtlpCollector, lines: list[TimelineLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector, "DEADLINE_S", 1.0)
    server.is_silent.set()
    found = send(_endpoint(server, OTEL_EXPORTER_OTLP_TIMEOUT="200"), lines, {})
    assert found.offsets == {}
    assert "does not answer in time" in found.problem


def test_a_slow_server_costs_no_more_than_the_deadline_of_a_look(
    server: OtlpCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeline = Timeline.start(tmp_path, job="j", submission="s", attempt=0, node="n", rank=0)
    for number in range(1100):
        timeline.note(f"stage {number}", 10**18, 1)
    lines = list(outgoing([timeline.path]))
    take = server.take

    def take_slowly(path: str, headers: Mapping[str, str], body: bytes) -> None:
        pause(2.0)
        take(path, headers, body)

    with monkeypatch.context() as patched:
        patched.setattr(collector, "DEADLINE_S", 1.5)
        patched.setattr(server, "take", take_slowly)
        found = send(_endpoint(server, OTEL_EXPORTER_OTLP_TIMEOUT="200000"), lines, {})
    assert "the rest is sent later" in found.problem
    assert len(server.messages) <= 1
    assert send(_endpoint(server), lines, found.offsets).problem == ""
    assert [span.name for span in server.spans()] == [f"stage {n}" for n in range(1100)]


def test_records_that_are_none_cost_no_others(
    server: OtlpCollector, lines: list[TimelineLine]
) -> None:
    span = {"traceId": "00" * 16, "spanId": "00" * 8, "name": "x"}
    nested: Any = {"stringValue": "x"}
    for _ in range(2000):
        nested = {"arrayValue": {"values": [nested]}}
    bad: tuple[Any, ...] = (
        {**span, "traceId": "xyz"},
        {**span, "spanId": "00"},
        {**span, "name": 5},
        {**span, "startTimeUnixNano": "-1"},
        {**span, "kind": 2**70},
        {**span, "attributes": [{"key": "k", "value": nested}]},
        {**span, "name": "x" * 100_000},
        [],
    )
    hostile = [
        TimelineLine("f", number + 1, {"resourceSpans": [{"scopeSpans": [{"spans": [one]}]}]})
        for number, one in enumerate(bad)
    ]
    hostile += [
        TimelineLine("f", 20, {"resourceSpans": "x"}),
        TimelineLine("f", 21, {"resourceSpans": [7]}),
    ]
    found = send(_endpoint(server), [*hostile, *lines], {})
    assert found.problem == ""
    assert [one.name for one in server.spans()] == ["load"]
    assert found.offsets["traces f"] == 21


def test_every_field_is_that_of_the_schema() -> None:
    record = {
        "timeUnixNano": "5",
        "observedTimeUnixNano": "6",
        "severityNumber": 9,
        "severityText": "INFO",
        "body": {"kvlistValue": {"values": [{"key": "a", "value": {"bytesValue": "AAE="}}]}},
        "flags": 1,
        "traceId": "0a" * 16,
        "spanId": "0b" * 8,
        "eventName": "e",
    }
    span = {
        "traceId": "0a" * 16,
        "spanId": "0b" * 8,
        "parentSpanId": "0c" * 8,
        "traceState": "s",
        "name": "n",
        "kind": 3,
        "startTimeUnixNano": "1",
        "endTimeUnixNano": "2",
        "attributes": [{"key": "a", "value": {"arrayValue": {"values": [{"intValue": "1"}]}}}],
        "events": [{"timeUnixNano": "1", "name": "e"}],
        "links": [{"traceId": "0a" * 16, "spanId": "0b" * 8, "traceState": "t"}],
        "status": {"message": "m", "code": 1},
        "flags": 257,
    }
    scope = {"name": "s", "version": "1", "attributes": [{"key": "k", "value": {}}]}
    resource = {"attributes": [{"key": "r", "value": {"boolValue": True}}]}
    for path, name, inner, records, one in (
        ("/v1/traces", "resourceSpans", "scopeSpans", "spans", span),
        ("/v1/logs", "resourceLogs", "scopeLogs", "logRecords", record),
    ):
        groups = [
            {
                "resource": resource,
                inner: [{"scope": scope, records: [one], "schemaUrl": "u"}],
                "schemaUrl": "v",
            }
        ]
        expected = by_schema(path, {name: groups})
        assert MESSAGES[path].FromString(encode_groups(name, groups)) == expected


def test_variables_are_read_as_the_specification_says() -> None:
    common = {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:4318/base/"}
    traces, logs = endpoints(common)
    assert (traces.url, logs.url) == (
        "https://c:4318/base/v1/traces",
        "https://c:4318/base/v1/logs",
    )
    assert (traces.protocol, traces.timeout_s, traces.compresses) == ("http/protobuf", 10, False)
    (own,) = endpoints(
        {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c",
            "OTEL_EXPORTER_OTLP_HEADERS": "a=b",
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "c=d%2Ce , f=g=h,,",
            "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "500",
        }
    )
    assert own.url == "http://c/"
    assert own.headers == (("c", "d,e"), ("f", "g=h"))
    assert own.timeout_s == 0.5
    assert endpoints({**common, "OTEL_SDK_DISABLED": "true"}) == ()
    (only,) = endpoints({**common, "OTEL_LOGS_EXPORTER": "none"})
    assert only.signal == "traces"
    assert endpoints({"OTEL_EXPORTER_OTLP_HEADERS": "a=b"}) == ()


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "grpc is not supported"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": f"ftp://user:{_TOKEN}@host/"}, "is not an http://"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://u:{_TOKEN}@127.0.0.1:x/"}, "is not an http://"),
        ({"OTEL_EXPORTER_OTLP_HEADERS": f"a={_TOKEN}%0d%0ab"}, "cannot talk to 127.0.0.1"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    server: OtlpCollector,
    lines: list[TimelineLine],
    variables: dict[str, str],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collector, "DEADLINE_S", 0.5)
    found = send(_endpoint(server, **variables), lines, {})
    assert why in found.problem
    assert _TOKEN not in found.problem
    assert found.offsets == {}


def test_tls_with_an_own_authority(tmp_path: Path, lines: list[TimelineLine]) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=c")
    names = ("-addext", "subjectAltName=IP:127.0.0.1")
    files = ("-keyout", str(key), "-out", str(certificate))
    subprocess.run(["openssl", *words, *names, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with running_collector(context) as server:
        url = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"https://127.0.0.1:{server.port}"}
        stranger = send(_endpoint(server, **url), lines, {})
        assert "OTEL_EXPORTER_OTLP_CERTIFICATE" in stranger.problem
        assert "is not trusted" in stranger.problem
        trusted = {**url, "OTEL_EXPORTER_OTLP_CERTIFICATE": str(certificate)}
        assert send(_endpoint(server, **trusted), lines, {}).problem == ""
        assert len(server.spans()) == 1


def test_a_real_start_reaches_the_collector(server: OtlpCollector, tmp_path: Path) -> None:
    """The collector's headers are on no command line and in no file of the node."""
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.port}",
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={_TOKEN}",
    }
    with node_at(tmp_path / "node", (tmp_path / "store").as_uri()) as node:
        code = "import bootseer; bootseer.stage('mine').end(); bootseer.ready(); input()"
        pipes = {**_SILENT, "stdin": subprocess.PIPE}
        with node.start(
            "run", "--", sys.executable, "-c", code, variables=variables, **pipes
        ) as job:
            for _ in polling(interval_s=0.05):
                assert not any(_TOKEN in line for line in node.processes().values())
                if server.messages:
                    break
            job.communicate("\n", timeout=60)
        node.wait_clean()
        assert {"start", "mine", "ready"} <= {span.name for span in server.spans()}
        assert len({span.span_id for span in server.spans()}) == len(server.spans())
        assert not (tmp_path / "store").exists()
        files = [path for path in node.base.rglob("*") if path.is_file()]
        assert not any(_TOKEN.encode() in path.read_bytes() for path in files)


def test_a_dead_collector_costs_a_start_nothing(tmp_path: Path) -> None:
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    with node_at(tmp_path / "node", "") as node:
        done = node.run("run", "--", "sh", "-c", "echo done", variables=variables)
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
