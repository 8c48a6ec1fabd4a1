"""The quantities of the paper: those that it prints, and ours, which are made in the same way."""

from __future__ import annotations

from analysis.myelin.sweep_results import Row
from analysis.paper_data import counted, printed, value

DAY_S = 86400
SETUP, MEMORY, MODELS = "myelin_setup", "myelin_memory_model", "myelin_table1_models"
STAGES, MEMOPT, CHUNKS = "myelin_fig5_ginter", "myelin_fig6_memopt", "myelin_fig8_coarsening"
VALIDATION, WEAK, STRONG = "myelin_fig9_validation", "myelin_fig10_weak_scaling", "myelin_fig11_strong_scaling"
IPDPS = "myelin_ipdps_figures"
"""The files of what the paper prints; the last one was read off the plots of its published version."""
DAYS, PERCENT = "expected_training_time", "percent_of_peak"
"""The paper's figures of Fig. 10 and 11."""
WITH, WITHOUT = "with memory optimization", "without memory optimization"
PHASES = ("pipelining", "data_parallel", "optimizer")
"""The phases of a step, one after the other."""
STATE = ("weights", "gradients", "optimizer")
WEIGHT_BYTES = 2


def days(row: Row) -> float:
    """Estimated training time: 300e9 words, as many a step as its tokens (Sec. VI-D)."""
    config, words = row.config, printed(WEAK, "tokens_for_training_time")
    return words * row.step_s / (config["batch"]["size"] * config["model"]["sequence"]) / DAY_S


def flops(row: Row) -> float:
    """Hardware FLOPs of a step, recomputation included: the paper's 96 b s l h^2 (1 + s / 6h + V / 16 l h)."""
    model, b = row.config["model"], row.config["batch"]["size"]
    s, layers, h, v = (model[key] for key in ("sequence", "layers", "hidden", "vocabulary"))
    return float(96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h)))


def percent_of_peak(row: Row) -> float:
    """Return hardware FLOPs in percent of all devices' peaks."""
    return 100 * flops(row) / row.step_s / (1e12 * printed(SETUP, "gpu_peak_half") * row.mesh.size)


def tail_s(row: Row) -> float:
    """Seconds after the pipelining phase: all-reduce over replicas and optimizer, overlapped or not."""
    return row.step_s - row.phase_s("pipelining")


def state_bytes(row: Row) -> list[tuple[int, int, int]]:
    """Return for each stage: parameters, bytes of the model state for each of them all the time, bytes of buckets.

    From the accounting of the run's engine. Stages that tie a weight have a copy each.
    """
    states = []
    for peak in row.metrics["peaks"]:
        held = peak["contents"]
        state = sum(held.get(part, 0) for part in STATE)
        states.append((held["weights"] // WEIGHT_BYTES, state, held.get("buckets", 0)))
    return states


def state_of_a_parameter(row: Row) -> float:
    """Bytes of the model state over all stages, buckets included, for each parameter of theirs."""
    each = state_bytes(row)
    return sum(held + buckets for _, held, buckets in each) / sum(phi for phi, _, _ in each)


def state_is_exact(row: Row) -> bool:
    """Whether the state is 20 bytes a parameter on each stage, or with offloading 4 and 16 for each of a bucket's."""
    plain, resident, bucket = published_bytes()
    if row["engine.offload"] != "true":
        return all((held, buckets) == (plain * phi, 0) for phi, held, buckets in state_bytes(row))
    bsize = row.config["engine"]["bsize"]
    return all((held, buckets) == (resident * phi, bucket * min(bsize, phi)) for phi, held, buckets in state_bytes(row))


def published_bytes() -> tuple[float, float, float]:
    """The paper's model state: bytes of each parameter, plain and offloaded, and of each parameter of a bucket."""
    plain, resident, bucket = (
        printed(MEMORY, name) for name in ("model_state_total", "optimized_resident", "optimizer_bucket_bytes")
    )
    return plain, resident, bucket


def published_tail_s() -> tuple[float, float]:
    """The paper's sums and updates one after the other (Sec. V-C): the updates take a share of the sums."""
    sums_s = printed(MEMOPT, "data_parallel_phase_time", scheme=WITH)
    return sums_s, sums_s / printed(CHUNKS, "all_reduce_time_over_optimizer_time")


def published_parameters(row: Row) -> float | None:
    """The paper's number of parameters: in Table I, or of the model of the validation."""
    return counted(VALIDATION, "parameters", model=row.size) or counted(
        MODELS, "parameters", model=f"GPT-like {row.size}"
    )


def published_batch_s(stages: int) -> float | None:
    """The paper's pipelining phase on so many stages (Fig. 5), which is all that the figure has of a step."""
    return value(IPDPS, "batch_time", case=f"G_inter={stages}")


def memory_scheme(row: Row) -> str:
    """The paper's name of a run with or without its memory optimization."""
    return WITH if row["engine.offload"] == "true" else WITHOUT


def published_phase_s(row: Row, phase: str) -> float | None:
    """The paper's phase with or without the memory optimization (Fig. 6, Sec. V-B), on the grid that it draws."""
    if phase == "optimizer":
        return value(IPDPS, "optimizer_time", case=memory_scheme(row))
    return value(MEMOPT, f"{phase}_phase_time", scheme=memory_scheme(row))


def published_memory_gb(row: Row) -> float | None:
    """The paper's memory of all devices with or without the memory optimization (Sec. V-B), on 24 stages."""
    return value(MEMOPT, "total_memory_usage", scheme=memory_scheme(row))


def published_overlapped_s(k: int) -> float | None:
    """The paper's sums and updates in chunks of k buckets (Fig. 8); with k = 0 one after the other."""
    return value(IPDPS, "allreduce_plus_optimizer_time", case=f"k={k}") if k else sum(published_tail_s())


def gpus(row: Row) -> int:
    """GPUs of a point's nodes."""
    return int(row["cluster.nodes"]) * int(printed(SETUP, "gpus_per_node"))


def published_scaling(row: Row, figure: str, metric: str) -> float | None:
    """The paper's days or percent of peak of a framework, in Fig. 10 for the model's size, in Fig. 11 for the GPUs."""
    where: dict[str, int | str] = {"model": row.size} if figure == "Fig. 10" else {"devices": gpus(row)}
    return value(IPDPS, metric, scheme=row.framework, table=figure, **where)
