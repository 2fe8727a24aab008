"""An experiment: head curves corrected by gradients at the sparse allocation, against two controls.

    python benchmarks/second_look.py MODEL LENGTH OUT.json --contexts 8 --cost flops --looser 1.6
"""
import sys, json, time, argparse, tempfile, copy
from dataclasses import replace, fields
from pathlib import Path
import numpy as np, torch
import profiling.inside.gradients as G
from profiling.inside.gradients import *
from profiling.inside.gradients import _entry,_frozen,_head_of,_recomputing,_states,_TRIED
from profiling.inside.head_fidelity import dense_of_layer
from profiling.inside.capture import *
from profiling.inside.capture import attending, attending_with, layer_mask, masks_of, inputs_of, Run, attend_densely
from kernels.gradient import attention_gradients
from profiling.quality.contexts import spread_positions
from profiling.quality.sequences import planned, sequences, Reference, kl_divergence, log_probabilities
from profiling.models.loading import load_model
from profiling.models.device import settled
from profiling.prompts.held_out import Seen
from profiling.prompts.prompt import parse_task
from runtime.fingerprint import fingerprint
from search.model.allocation import CostCurves
from search.model.candidates import candidate_grid
from search.model.config import ModelSearch
from search.model.costs import Costs
from search.model.curves import Curves
from search.model.prompts import HeldOut, calibration_prompts, length_of
from search.model.refine import refine
from search.model.scored_prompts import score_prompts
from search.model.start import start_run
from search.model.timed_costs import time_candidates
from search.model.losses import context_losses
from search.study import study_name

p = argparse.ArgumentParser()
p.add_argument("model"); p.add_argument("length", type=int); p.add_argument("out", type=Path)
p.add_argument("--contexts", type=int, default=8); p.add_argument("--seed", type=int, default=777)
p.add_argument("--cost", default="seconds"); p.add_argument("--max-lost", type=float, default=0.05)
p.add_argument("--tasks", nargs="+", default=["facts","label_map","chain","line_asked","prose"])
p.add_argument("--tmp", default="second_look"); p.add_argument("--looser", type=float, default=1.0); p.add_argument("--control", action="store_true"); o = p.parse_args()

class Factored(Curves):
    def losses(self):
        base = super().losses()
        return {k: v * self.factors[k][..., None] if k in self.factors else v for k, v in base.items()}

def factored(curves, factors):
    new = Factored(**{f.name: getattr(curves, f.name) for f in fields(Curves)})
    object.__setattr__(new, "factors", factors)
    return new

class _Look(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, inputs, cached, attend, visit, backend):
        if inputs.layer not in cached:
            out, lse = dense_of_layer(inputs, backend=backend)
            sparse = attend(inputs)
            cached[inputs.layer] = (sparse, out, lse)
        ctx.save_for_backward(q, k, v)
        ctx.about = inputs, cached, visit
        return cached[inputs.layer][0].clone()
    @staticmethod
    def backward(ctx, by_out):
        inputs, cached, visit = ctx.about
        q, k, v = ctx.saved_tensors
        sparse, out, lse = cached.pop(inputs.layer)
        visit(inputs.layer, sparse, out, by_out)
        g = attention_gradients(q, k, v, out, lse, by_out, scale=inputs.scale, softcap=inputs.softcap)
        return *g, None, None, None, None, None

def look(model, ids, context, positions, plans, expected, backend):
    """marginals by layer: m (H), sd (H); kl mean."""
    ms = {}
    attend = planned(plans, context, backend=backend)
    run = Run(lambda inputs: None)
    cached = {}
    def visit(layer, sparse, out, by_out):
        d = (by_out.float() * (out - sparse).float())[0].sum(-1).double()   # H,S
        ms[layer] = ((-d).sum(-1).numpy(), d.square().sum(-1).sqrt().numpy())
    def attention(module, *a, **kw):
        inputs, mask = inputs_of(run, module, *a, **kw)
        run.visits += 1
        if mask is not None:
            return attend_densely(run, module, *a, **kw)
        if inputs.layer not in plans:
            out = _Look.apply(inputs.q, inputs.k, inputs.v, inputs, cached, lambda i: dense_of_layer(i, backend=backend)[0], lambda *x: None, backend)
        else:
            out = _Look.apply(inputs.q, inputs.k, inputs.v, inputs, cached, attend, visit, backend)
        return out.transpose(1, 2).contiguous(), None
    with torch.enable_grad(), masks_of(run), attending_with(model, NAME, attention, layer_mask), _recomputing(model), _frozen(model):
        saved = dict(plans)
        plans_empty = {}
        head = _head_of_dense(model, ids[:, :_TRIED])
        with _entry(model) as entered:
            states = _states(model, ids)
        st = states.detach(); grad = torch.zeros_like(st); kls = []
        for at in range(0, len(positions), 128):
            pos = positions[at:at+128]
            part = st[:, pos].requires_grad_(True)
            lp = head(part)[0].float().log_softmax(-1)
            e = expected[at:at+128].float()
            kl = (e.exp() * (e - lp)).sum(-1)
            grad[:, pos] += torch.autograd.grad(kl.sum(), part)[0]
            kls.append(kl.detach())
        torch.autograd.grad(states, entered[0], grad)
    return ms, torch.cat(kls)

def _head_of_dense(model, ids):
    return HEAD

@torch.inference_mode()
def logprobs(model, ids, positions, visit):
    with attending(model, visit):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=positions).logits[0]
    return log_probabilities(logits), margins(logits, ids[0, positions + 1])

def scored(seq, most):
    if seq.is_text:
        return spread_positions(seq.context, most)
    return torch.tensor([at for a, b in seq.answers for at in range(a - 1, b - 1)])

loaded = load_model(o.model, dtype="bfloat16", device="cpu")
model = loaded.model
tmp = Path(o.tmp); tmp.mkdir(exist_ok=True)
cfg0 = dict(model=o.model, out=str(tmp / "cfg.yaml"), length=o.length, cost=o.cost, dtype="bfloat16", device="cpu", picture=False)

def make(samples):
    global HEAD
    config = settled(ModelSearch(**(cfg0 | dict(samples=samples, out=str(tmp / f"cfg{samples}.yaml"))), command="x"), model)
    info = fingerprint(model, name=loaded.name)
    prompts = calibration_prompts(config, loaded, o.length)
    seen = Seen(prompts)
    from profiling.ranks import Ranks
    started = start_run(config, loaded, info, prompts, candidate_grid(o.length), length=o.length, tails=config.tails, seen=seen, ranks=Ranks(), began=time.monotonic(), tasks=[])
    run = started.__enter__()
    t = time.monotonic()
    ref = run.reference(prompts); run.calibration = ref.sequences
    curves, fault = score_prompts(run, ref)
    print(f"samples {samples}: scoring {time.monotonic()-t:.0f} s", flush=True)
    if samples == 1:
        run.costs = Costs.flops(info, length=o.length, dtype="bfloat16") if o.cost == "flops" else time_candidates(run, ref.sequences[0], curves)
    else:
        run.costs = BASE.costs
    run.heads = CostCurves.of(curves, run.costs, run.candidates)
    run.start_study(None, study_name("search", config.out), [])
    t = time.monotonic()
    run.allocation = refine(run, ref, limits=config.limits, budget=None)
    print(f"refine {time.monotonic()-t:.0f} s; budget {run.spent}; tail {run.allocation.tail}; weights {run.allocation.prompt_weights}", flush=True)
    return run, ref, seen, config

with torch.inference_mode(False):
    HEAD = _head_of(model, torch.arange(100, 100 + _TRIED)[None])
run, ref, seen, config = make(1); BASE = run
base = run.allocation
if o.looser != 1:
    base = run.heads.cheapest({k: o.looser * v for k, v in run.heads.predicted_by_kind(base).items()}, base.tail, prompt_weights=base.prompt_weights)
dens = run.density(base.tail)
print("base: spent", run.heads.share(base.cost), "density", float(np.nanmean(base.pick(dens))), "predicted", run.heads.predicted_by_kind(base), flush=True)

def look_all(run, allocation, seqs):
    L, H = base.candidates.shape
    out = {}
    for seq in seqs:
        kind = "text" if seq.is_text else "answer"
        ids = torch.tensor([seq.ids]); pos = scored(seq, 1024)
        t = time.monotonic()
        exp, _ = logprobs(model, ids, pos, planned({}, seq.context, backend=run.backend))
        t1 = time.monotonic()
        ms, kl = look(model, ids, seq.context, pos, run.plans(allocation), exp, run.backend)
        print(f"look {seq.task}: dense {t1-t:.0f} s, look {time.monotonic()-t1:.0f} s, KL {float(kl.mean()):.4f}", flush=True)
        m = np.zeros((L, H)); sd = np.zeros((L, H))
        for layer, (a, b) in ms.items():
            m[layer] = a / len(pos); sd[layer] = b / len(pos)
        out.setdefault(kind, []).append((m, sd, float(kl.mean())))
    return out

def factors_of(run, allocation, seqs):
    looks = look_all(run, allocation, seqs)
    losses = run.heads.curves[allocation.tail].losses()
    res = {}
    for kind, parts in looks.items():
        m = np.mean([a for a, _, _ in parts], 0); sd = np.sqrt(np.sum([b**2 for _, b, _ in parts], 0)) / len(parts)
        kl = np.mean([c for _, _, c in parts])
        chosen = np.nan_to_num(allocation.pick(losses[kind]))
        scaled = chosen * kl / max(chosen.sum(), 1e-12)
        f = np.clip((m - sd) / np.maximum(2 * scaled, 1e-12), 1, 16)
        f[chosen <= 0] = 1
        f *= chosen.sum() / (f * chosen).sum()
        res[kind] = f
    return res

def with_factors(run, tail, factors):
    return replace(run.heads, curves={t: factored(c, factors) for t, c in run.heads.curves.items()})

B = base.cost
w15 = dict(base.prompt_weights); w15["text"] = w15.get("text", 1) * 1.5
arms = {"base": base, "weights": run.heads.allocate(B, base.tail, prompt_weights=w15)}
f1 = factors_of(run, base, ref.sequences)
heads1 = with_factors(run, base.tail, f1)
arms["second"] = heads1.allocate(B, base.tail, prompt_weights=w15)

seen2 = seen
if o.control:
    run2, ref2, seen2, _ = make(2)
    arms["twice the prompts"] = run2.heads.allocate(B, base.tail, prompt_weights=run2.allocation.prompt_weights)



for name, a in arms.items():
    print(f"{name:<28} cost {a.cost / B:.3f} of base, moved {(a.candidates != base.candidates).sum()}", flush=True)

for s in (seen2,):
    pass
rows = []
import itertools
for task in o.tasks:
    held = HeldOut((task,), loaded, length=o.length, samples=1, seed=o.seed, seen=seen2, first=1000)
    kind = "text" if task == "prose" else "answer"
    prompts = held.take(kind, 4)
    while True:
        seqs = sequences(prompts, loaded.tokenizer)
        if len(seqs) >= o.contexts: break
        more = held.take(kind, 4)
        if not more: break
        prompts += more
    for seq in seqs[:o.contexts]:
        ids = torch.tensor([seq.ids]); pos = scored(seq, 1024)
        exp, dm = logprobs(model, ids, pos, planned({}, seq.context, backend=run.backend))
        sizes = [b - a for a, b in seq.answers]
        row = {"task": task, "unit": seq.unit, "answers": len(sizes), "arms": {}}
        def right(mar): return [bool((x > 0).all()) for x in mar.split(sizes)] if sizes else []
        def clear(mar, w): return [float(torch.special.ndtr(x.double() / w).prod()) for x in mar.split(sizes)] if sizes else []
        dr = right(dm); row["dense"] = {"right": sum(dr), **{f"clear{w}": sum(clear(dm, w)) for w in (.25, .5, 1.)}}
        tgt = ids[0, pos + 1]
        dn = -exp.gather(1, tgt[:, None])[:, 0]
        for name, a in arms.items():
            lp, mar = logprobs(model, ids, pos, planned(run.plans(a), seq.context, backend=run.backend))
            kl = kl_divergence(exp, lp).clamp_min(0)
            r = right(mar)
            nl = -lp.gather(1, tgt[:, None])[:, 0]
            row["arms"][name] = {"kl": float(kl.mean()), "right": sum(r), "lost": sum(x and not y for x, y in zip(dr, r)), "won": sum(y and not x for x, y in zip(dr, r)), "rise": float((nl - dn).mean()), **{f"clear{w}": sum(clear(mar, w)) for w in (.25, .5, 1.)}}
        rows.append(row)
        print(task, row["answers"], row["dense"]["right"], {n: (round(v["kl"], 4), v["right"]) for n, v in row["arms"].items()}, flush=True)
        o.out.write_text(json.dumps({"model": o.model, "length": o.length, "spent": run.spent, "costs": {n: a.cost / B for n, a in arms.items()}, "rows": rows}, indent=1))
