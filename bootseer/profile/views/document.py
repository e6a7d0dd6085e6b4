"""An explained start as a JSON document for programs; docs/json.md lists its members. Pure."""

from typing import Any

from bootseer.profile.model.analysis import Analysis
from bootseer.profile.model.path import Segment


def analysis_document(analysis: Analysis) -> dict[str, Any]:
    """The members of `bootseer report --json` that the model adds."""
    return {
        "is_ready": analysis.is_ready,
        "ready_s": analysis.ready_s,
        "before_s": analysis.before_s,
        "since_submission_s": analysis.before_s + analysis.ready_s if analysis.before_s else None,
        "node_count": analysis.node_count,
        "rank_count": analysis.rank_count,
        "replay_error_s": analysis.replay_error_s,
        "requests": [
            {
                "kind": one.kind,
                "median_count": one.median_count,
                "max_count": one.max_count,
                "max_node": one.max_node,
            }
            for one in analysis.requests
        ],
        "fan_out": None
        if analysis.fan_out is None
        else {
            "node_count": analysis.fan_out.node_count,
            "received_bytes": analysis.fan_out.received_bytes,
            "store_bytes": analysis.fan_out.store_bytes,
        },
        "critical_path": [_segment(one) for one in analysis.path],
        "blame": [
            {
                "barrier": one.barrier,
                "node": one.node,
                "rank": one.rank,
                "arrived_s": one.arrived_s,
                "late_s": one.late_s,
                "lost": [{"stage": str(label), "seconds": seconds} for label, seconds in one.lost],
            }
            for one in analysis.blame
        ],
        "missed_barriers": [
            {
                "barrier": one.barrier,
                "gave_up": list(one.gave_up),
                "expected_count": one.expected_count or None,
                "came_count": one.came_count,
                "absent": list(one.absent),
                "spread_s": one.spread_s,
                "waited_s": one.waited_s,
            }
            for one in analysis.missed
        ],
        "stragglers": [
            {
                "node": one.node,
                "cause": one.cause.name,
                "evidence": one.cause.evidence,
                "lost_s": one.lost_s,
                "stages": [
                    {
                        "stage": str(outlier.label),
                        "role": outlier.role,
                        "seconds": outlier.seconds,
                        "median_s": outlier.peers_s,
                        "sigmas": outlier.sigmas,
                    }
                    for outlier in one.outliers
                ],
            }
            for one in analysis.stragglers
        ],
        "what_ifs": [
            {
                "name": one.name,
                "ready_s": one.ready_s,
                "saved_s": one.saved_s,
                "saved_gpu_hours": one.saved_gpu_hours,
            }
            for one in analysis.what_ifs
        ],
        "clocks": {
            "shift_s": analysis.clocks.shift_s,
            "spread_s": analysis.clocks.spread_s,
            "apart": list(analysis.clocks.apart),
        },
    }


def _segment(one: Segment) -> dict[str, Any]:
    return {
        "node": one.node,
        "rank": one.rank,
        "role": one.role,
        "stage": str(one.label),
        "begin_s": one.begin_s,
        "seconds": one.seconds,
        "is_wait": one.is_wait,
    }
