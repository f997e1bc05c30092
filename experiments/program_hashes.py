# SPDX-License-Identifier: Apache-2.0
"""Which programs does jboost compile? The guard of a refactoring.

    python experiments/program_hashes.py --out before
    python experiments/program_hashes.py --compare before/program_hashes.json

Every case below runs in one process, and JAX writes the StableHLO of each program that
it compiles for it. The result is the SHA-256 of each text, without locations and names
of functions, which a move changes. Equal programs on equal inputs give equal bits at
equal speed, so that a commit that must not change a model leaves all hashes as they
were. Hashes depend on the versions of JAX and of the compiler: compare on one machine.
"""

import collections
import hashlib
import json
import re
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from experiment_tools import make_parser, write_json

import jboost as jb

ROWS, FEATURES = 300, 4
LOSSES = jb.losses


def log_cosh(score, target):
    """A custom loss, which no shortcut knows."""
    return jnp.log(jnp.cosh(score - target)) + 0.1 * (score - target) ** 2


def pinballs(scores, target):
    """Two quantiles that share their rows."""
    tau = jnp.array([0.1, 0.9])
    return jnp.sum(jnp.maximum(tau * (target - scores), (tau - 1) * (target - scores)))


def make_cases():
    """Returns {name: function that trains or predicts}."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, FEATURES)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] * x[:, 2] + 0.3 * random.normal(size=ROWS)).astype("f4")
    weights = random.uniform(0.5, 2, ROWS).astype(np.float32)
    gaps = np.where(random.random(x.shape) < 0.1, np.nan, x)
    codes = np.column_stack([x[:, :3], random.integers(0, 6, ROWS)]).astype("f4")
    binary, classes = (y > 0).astype(np.float32), np.digitize(y, [-1, 1])
    counts, groups = np.round(np.exp(y / 2)), np.arange(ROWS) // 10
    times = dict(time=np.exp(y), event=binary)
    sparse = scipy.sparse.csr_array(np.where(np.abs(x) < 1, 0, x))
    short = dict(num_rounds=3, max_depth=3, max_bins=32)
    model, _ = jb.fit(x, y, **short)

    def fit(loss=LOSSES.squared_error, targets=y, rows=x, **settings):
        return lambda: jb.fit(rows, targets, loss, **{**short, **settings})

    def boost():
        key, codes = jax.random.key(0), jb.apply_bins(jb.fit_bins(x, max_bins=32), x)
        train = lambda y: jb.boost(codes, y, log_cosh, key=key, **short)[1]  # noqa: E731
        return jax.jit(train)(y), jax.vmap(train)(jnp.stack([y, -y]))

    def stream():
        batches = jb.streams.array_batches(x, y, batch_rows=100)
        with tempfile.TemporaryDirectory() as folder:
            rows = jb.stream(batches, memory="64 MiB", directories=folder)
            return [jb.fit(rows, loss=loss, **short) for loss in (log_cosh, pinball)]

    pinball = jax.tree_util.Partial(LOSSES.quantile, tau=0.9)
    return {
        "squared": fit(),
        "logistic": fit(LOSSES.logistic, binary),
        "poisson": fit(LOSSES.poisson, counts),
        "absolute": fit(LOSSES.absolute_error),
        "huber": fit(jax.tree_util.Partial(LOSSES.huber, delta=0.5)),
        "quantile": fit(pinball),
        "custom": fit(log_cosh),
        "softmax": fit(LOSSES.softmax, classes, num_scores=3),
        "pinballs": fit(pinballs, num_scores=2),
        "shared trees": fit(pinballs, num_scores=2, share_structure=True),
        "lambdarank": fit(LOSSES.lambda_rank, classes, groups=groups),
        "cox": fit(LOSSES.cox, times, groups="all"),
        "columns": fit(LOSSES.squared_error, np.column_stack([y, -y]), num_scores=2),
        "weights, gaps": fit(log_cosh, rows=gaps, sample_weight=weights, offset=y / 2),
        "categories": fit(rows=codes, categorical=[3]),
        "sampled": fit(log_cosh, subsample=0.7, colsample_bytree=0.6),
        "constrained": fit(monotone={0: 1}, interactions=[[0, 1], [2, 3]], l1=0.1),
        "leaves": fit(max_leaves=5, max_delta_step=0.5),
        "exact growth": fit(log_cosh, candidates="exact"),
        "sparse": fit(log_cosh, rows=sparse),
        "watched": fit(validation=(x, y), metrics=["mae"], early_stopping_rounds=2),
        "xla": fit(log_cosh, implementation="xla"),
        "absolute units": fit(regularization="absolute", min_gain=0.01),
        "continued": fit(model=model),
        "boost": boost,
        "stream": stream,
        "folds": lambda: jb.cross_validate(x, y, log_cosh, folds=3, **short),
        "sweep": lambda: jb.sweep(x, y, log_cosh, {"l2": [0.1, 1]}, folds=2, **short),
        "refit": lambda: jb.refit(model, x, y + 1),
        "predict": lambda: [jb.predict(model, rows) for rows in (x, x[:1])],
        "predict, xla": lambda: jb.predict(model, x, implementation="xla"),
        "shap": lambda: jb.shap_values(model, x[:20]),
        "classifier": lambda: jb.sklearn.JBoostClassifier(num_rounds=3).fit(x, classes),
        "tree": lambda: jb.cart.fit_tree(x, y, max_depth=3),
    }


def hash_program(text):
    """Returns the SHA-256 of a program without what moving its functions changes."""
    text = re.sub(r"^#loc.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r" ?loc\([^\n]*?\)(?=$|[ ,)])", "", text, flags=re.MULTILINE)
    text = re.sub(r"module @\S+", "module", text)
    text = re.sub(r' \{jax\.result_info = "[^"]*"\}', "", text)  # names of fields
    names = dict.fromkeys(re.findall(r"@[\w.$]+", text))
    numbers = {name: f"@{index}" for index, name in enumerate(names)}
    text = re.sub(r"@[\w.$]+", lambda found: numbers[found[0]], text)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_case(function):
    """Returns {hash: how many programs} of those that a case compiles."""
    jax.clear_caches()
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_dump_ir_to", folder)
        jax.block_until_ready(function())
        jax.config.update("jax_dump_ir_to", None)
        texts = [path.read_text() for path in Path(folder).rglob("*.mlir")]
    return collections.Counter(map(hash_program, texts))


def main():
    """Runs all cases, and writes and compares their programs."""
    parser = make_parser(__doc__)
    parser.add_argument("--compare", type=Path, metavar="FILE", help="of a run before")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names")
    args = parser.parse_args()
    before = json.loads(args.compare.read_text()) if args.compare else {}
    cases = make_cases()
    cases = {n: f for n, f in cases.items() if any(word in n for word in args.only)}
    found = {}
    for name, function in cases.items():
        programs = run_case(function)
        found[name] = dict(programs)
        line = f"{name}: {programs.total()} programs"
        if name in before and programs != collections.Counter(before[name]):
            lost = collections.Counter(before[name]) - programs
            new = programs - collections.Counter(before[name])
            line += f", CHANGED: {new.total()} new, {lost.total()} lost"
        print(line, flush=True)
    write_json(args.out / "program_hashes.json", found)
    changed = [name for name in found if name in before and found[name] != before[name]]
    raise SystemExit(f"changed: {', '.join(changed)}" if changed else 0)


if __name__ == "__main__":
    main()
