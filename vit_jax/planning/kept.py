"""The bytes of values that live during a program, counted on its jaxpr."""

import math

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxprs_in_params

_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call",
          "custom_vjp_call", "custom_vjp_call_jaxpr", "shard_map", "custom_lin")
_MOVES = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev", "slice", "iota", "pad",
          "select_n", "split", "convert_element_type", "sharding_constraint", "clamp", "tile", "copy",
          "random_wrap", "random_unwrap", "random_fold_in", "random_split", "random_seed", "random_bits", "threefry2x32")
_LOOPS = ("scan", "while", "cond")
_PRODUCTS = ("dot_general", "conv_general_dilated")
_OWN = ("sort", "optimization_barrier", "rng_bit_generator", "pallas_call", "ffi_call", "custom_lin")


def _inner(eqn):
    return [j.jaxpr if isinstance(j, ClosedJaxpr) else j for j in jaxprs_in_params(eqn.params)]


def _is_fused(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    if name in _MOVES:
        return True
    if name in _OWN or name in _PRODUCTS or name.startswith("cum") or len(eqn.outvars) != 1 or _inner(eqn):
        return False
    out = eqn.outvars[0].aval
    return all(
        v.aval.ndim in (0, out.ndim) and all(a in (1, b) for a, b in zip(v.aval.shape, out.shape, strict=False))
        for v in eqn.invars
    )


class _Value:
    __slots__ = ("bytes", "size", "uses", "why", "source", "roots", "born", "dies")

    def __init__(self, aval, why):
        self.size = getattr(aval, "size", 0)
        self.bytes = self.size * getattr(aval.dtype, "itemsize", 0)
        self.uses, self.why, self.source = 0, why, None


def _flatten(jaxpr, env, out):
    def read(v):
        return None if isinstance(v, Literal) else env.get(v)
    for eqn in jaxpr.eqns:
        inner = _inner(eqn)
        if eqn.primitive.name in _CALLS and inner:
            j = inner[0]
            ins = [read(v) for v in eqn.invars]
            sub = dict(zip(j.invars, ins[len(ins) - len(j.invars):]))
            env.update(zip(eqn.outvars, _flatten(j, sub, out)))
        else:
            ins = [x for v in eqn.invars if (x := read(v)) is not None]
            outs = [_Value(v.aval, eqn.primitive.name) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outs))
            for x in set(ins):
                x.uses += 1
            out.append((eqn, ins, outs))
    return [read(v) for v in jaxpr.outvars]


def peak(jaxpr, report=None):
    env, ops = {}, []
    outs = [o for o in _flatten(jaxpr, env, ops) if o is not None]
    for o in outs:
        o.uses += 1
    working = {}
    for t, (eqn, ins, res) in enumerate(ops):
        if eqn.primitive.name in _LOOPS:
            working[t] = max(peak(j, report)[0] for j in _inner(eqn))
    forced = set()
    while True:
        found = _walk(ops, outs, forced)
        if found <= forced:
            break
        forced |= found
    values = {r for _, _, res in ops for z in res for r in z.roots}
    end = 2 * len(ops)
    change = [0] * (end + 3)
    for v in values:
        change[v.born] += v.bytes
        change[v.dies + 1] -= v.bytes
    best = now = at = 0
    for t in range(end + 1):
        now += change[t]
        total = now + (working.get(t // 2, 0) if t % 2 else 0)
        if total > best:
            best, at = total, t
    if report is not None:
        report.append((at // 2, len(ops), working.get(at // 2, 0), sorted([(v.bytes, v.why, v.born // 2, v.dies // 2) for v in values if v.born <= at <= v.dies], key=lambda x: -x[0])))
    return best, sum(r.bytes for r in set().union(*(o.roots for o in outs)))


def _walk(ops, outs, forced):
    """Set the roots and times of all values; return the values that must be made."""
    found = set()

    def big(v):
        return [r for r in v.roots if 2 * r.bytes >= v.bytes]

    def use(v, t, make):
        if make and v not in v.roots and v.roots:
            z = v  # the narrowest form of the value
            while v.source is not None and v not in forced:
                v = v.source
                if v.bytes < z.bytes and v.roots:
                    z = v
            if z.roots != frozenset([z]) and z not in forced:
                found.add(z)
            v = z
        for r in v.roots:
            r.born, r.dies = min(r.born, t), max(r.dies, t)

    for t, (eqn, ins, res) in enumerate(ops):
        name = eqn.primitive.name
        if _is_fused(eqn):
            roots = frozenset().union(*(v.roots for v in ins))
            for z in res:
                z.roots, z.source = roots, None
                z.born, z.dies = 1 << 60, 0
                # The last operation on a product's result writes it.
                taken = next((v for v in ins if v in v.roots and v.why in ("product", "taken") and v.uses == 1
                              and v.size == z.size and z.bytes <= v.bytes), None)
                if taken is not None or z in forced:
                    for r in roots:
                        r.dies = max(r.dies, 2 * t - 1)
                        r.born = min(r.born, 2 * t - 1)
                    if taken is not None:
                        taken.dies = -1
                        taken.born = 0
                        z.why = "taken"
                    z.roots, z.born = frozenset([z]), 2 * t
                    z.dies = 2 * t
                elif len(ins) == 1:
                    z.source = ins[0]
            continue
        for v in ins:
            several = len(big(v)) > 1
            use(v, 2 * t + 1, make=several if name in _PRODUCTS else name in _OWN or name in _LOOPS)
        for z in res:
            z.roots, z.source, z.born, z.dies = frozenset([z]), None, 2 * t + 1, 2 * t + 1
            if name in _PRODUCTS:
                z.why = "product"
    for o in outs:
        use(o, 2 * len(ops), make=False)
    return found
