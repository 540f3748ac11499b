"""A plan as text."""

from ml_collections import ConfigDict


def summary(config: ConfigDict, plan: dict) -> str:
    """A plan (`estimate.plan_of`) as lines of text."""
    memory = plan["memory"]
    spare = memory["to_spare"]
    lines = [
        f"It {'fits' if plan['fits'] else 'does not fit'}: {memory['largest_program']} needs "
        f"{gib(memory['capacity'] - spare)} of {gib(memory['capacity'])} GiB on each device, "
        f"{gib(abs(spare))} {'to spare' if spare >= 0 else 'too much'}.",
    ]
    if without := plan.get("too_large_for"):
        lines.append(f"The run will end without a sample of text, because this doesn't fit: {', '.join(without)}.")
    if "of_train_step_by_cause" in memory:
        causes = memory["of_train_step_by_cause"].items()
        lines.append("Memory of a train step, GiB: " + ", ".join(f"{cause} {gib(size)}" for cause, size in causes))
    for name, times in plan.get("milliseconds", {}).items():
        causes = ", ".join(f"{cause} {time:.1f}" for cause, time in times["by_cause"].items())
        lines.append(
            f"{name}, ms: {causes}\n"
            f"  {times['cycles_alone']:.0f} ms by the compiler's cycles, {times['with_account']:.0f} with attention "
            "and with collectives that nothing hides"
        )
    if training := plan.get("training"):
        least, most = training["cycles_alone"], training["with_account"]
        cost = f", for {most['cost']:,.0f} (at least {least['cost']:,.0f})" if "cost" in most else ""
        of_peak = ""
        if most["utilisation"] is not None:
            of_peak = f"{most['utilisation']:.1%} to {least['utilisation']:.1%} of the chips' peak, "
        lines.append(
            f"Training: {most['tokens_per_second']:,.0f} to {least['tokens_per_second']:,.0f} tokens/s, "
            f"{of_peak}{least['hours']:,.1f} to {most['hours']:,.1f} hours to step {config.steps:,}{cost}; validation, "
            "saves and compilation come on top"
        )
    if plan.get("from_shapes"):
        lines.append(
            "This is the memory of the train step by its shapes, since nothing compiles for GPUs without one: what XLA "
            "needs for itself isn't in it, and times aren't modelled. The memory of a device is what JAX takes of it "
            "by default, three quarters (XLA_CLIENT_MEM_FRACTION)."
        )
    return "\n".join(lines)


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / 2**30:.2f}"
