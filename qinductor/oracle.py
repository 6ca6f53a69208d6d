"""The product oracle: how far a result may be from the exact one, measured by eager's distance."""

import dataclasses

import torch

RMS, LARGEST = 1.5, 2.0  # what errors may be, in eager's


@dataclasses.dataclass(frozen=True)
class Errors:
    """Distances of two results, ours and eager's, to the exact one.

    rms, largest  (ours, eager's), over what is finite in eager; infinite where only ours is not,
                  or only eager's
    at            where ours is furthest away
    """

    rms: tuple[float, float]
    largest: tuple[float, float]
    at: tuple[int, ...]

    def over(self, rms: float = RMS) -> str | None:
        """The first metric that is over its limit, with both; None: ours is as good as eager.
        `rms`: what ours may be in that, in eager's."""
        for metric, (ours, eager), factor in (
            ("rms error", self.rms, rms),
            ("largest error", self.largest, LARGEST),
        ):
            if not ours <= factor * eager:
                return f"{metric} {ours:.3g} is over its limit {factor * eager:.3g}"
        return None


def errors(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> Errors:
    """The errors of two results of one shape, against float64."""
    finite = eager.isfinite()
    error = torch.where(finite, ours.double() - exact, 0).abs()
    allowed = torch.where(finite, eager.double() - exact, 0).abs()
    same = (ours == eager) | (ours.isnan() & eager.isnan())
    error = torch.where(finite | same, error, torch.inf).nan_to_num(torch.inf)
    rms = [float(e.square().mean().sqrt()) for e in (error, allowed)]
    at = torch.unravel_index(error.argmax(), error.shape)
    return Errors(
        (rms[0], rms[1]), (float(error.max()), float(allowed.max())), tuple(int(i) for i in at)
    )
