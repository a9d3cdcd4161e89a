# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""The texts of the console's lines about steps and times."""


class Pace:
    """The time that a run still needs, from its mean pace since its first logged step.

    The first logged step itself is left out: it includes compilation and warm-up. Validation and
    saves between two logged steps are included.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._first: tuple[int, float] | None = None

    def left(self, step: int, now: float) -> float | None:
        """Return the seconds left after a logged step; None at the first one.

        Args:
            step: The logged step.
            now: A clock's seconds.
        """
        if self._first is None:
            self._first = step, now
        since, started = self._first
        if step == since:
            return None
        return (now - started) / (step - since) * max(0, self._steps - step)


def duration(seconds: float) -> str:
    """Return a time as ``h:mm:ss``, with days before it if there are any."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{days}d {h}:{m:02}:{s:02}" if days else f"{h}:{m:02}:{s:02}"


def step_line(
    step: int,
    steps: int,
    left: float | None,
    *,
    loss: float,
    grad_norm: float,
    lr: float | None,
    tokens: int | None,
    tokens_per_s: float,
    mfu: float | None,
    memory_gib: float,
) -> str:
    """Return the line of a logged step.

    Args:
        step: The step, from 1.
        steps: The run's last step.
        left: Seconds left, None if unknown.
        loss: Mean over all tokens of the step, nats per token.
        grad_norm: Norm of the full gradient before clipping.
        lr: Learning rate of the step.
        tokens: Tokens of all ranks since the first step.
        tokens_per_s: Of all ranks together.
        mfu: Percent of the device's peak, None if that is unknown.
        memory_gib: Peak of this rank.
    """
    parts = [
        f"step {step:>{len(str(steps))}}/{steps} ({step / steps:.1%})",
        f"{'-:--:--' if left is None else duration(left)} left",
        f"loss {loss:.5f}",
        f"grad norm {grad_norm:.4f}",
    ]
    if lr is not None:
        parts.append(f"lr {lr:.2e}")
    if tokens is not None:
        parts.append(f"{tokens:,} tokens")
    parts.append(f"{tokens_per_s:,.0f} tokens/s")
    if mfu is not None:
        parts.append(f"MFU {mfu:.2f}%")
    parts.append(f"memory {memory_gib:.2f} GiB")
    return "  ".join(parts)


def validation_line(step: int, loss: float, perplexity: float, seconds: float | None) -> str:
    """Return the line of a validation.

    Args:
        step: The training step before it.
        loss: Mean over its tokens, nats per token.
        perplexity: Its exponential.
        seconds: The time that it took.
    """
    took = "" if seconds is None else f"  in {seconds:.1f} s"
    return f"validation after step {step}  loss {loss:.5f}  perplexity {perplexity:,.2f}{took}"
