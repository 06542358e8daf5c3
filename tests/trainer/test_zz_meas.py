from tests.trainer.test_expert_parallel import FREE, relative_difference


def test_x(free):
    for n in FREE:
        o, p = free[n][0], free["one"][0]
        print(
            "MEAS",
            n,
            {
                k: f"{max(relative_difference(*x) for x in zip(getattr(o, k), getattr(p, k))):.1e}"
                for k in ("loss", "aux_loss", "z_loss", "grad_norm")
            },
            p.loss[0],
            p.loss[-1],
            min(p.grad_norm),
            [round(b / 0.01) for b in p.bias[9][0]],
        )
