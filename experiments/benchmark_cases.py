# SPDX-License-Identifier: Apache-2.0
"""What ``benchmark.py`` measures: sizes of data, losses, libraries, and targets.

Out: ``PLAN``, the steps in the order in which they are measured. A step takes readings
of several sources in turn; each of its lines is a ratio of their medians, which becomes
a row of the report and a dot of the picture.
"""

from typing import NamedTuple

TAU = 0.9
FOLDS = 5
NUM_QUERY_ROWS = 25  # all pairs of a query count in LightGBM and in XGBoost
LOSSES: dict[str, tuple[str | None, str | None]] = {  # XGBoost's, LightGBM's objective
    "squared_error": ("reg:squarederror", "regression"),
    "logistic": ("binary:logistic", "binary"),
    "absolute_error": ("reg:absoluteerror", "regression_l1"),
    "quantile": ("reg:quantileerror", "quantile"),
    "huber": (None, "huber"),
    "pseudo_huber": ("reg:pseudohubererror", None),
    "poisson": ("count:poisson", "poisson"),
    "gamma": ("reg:gamma", "gamma"),
    "tweedie": ("reg:tweedie", "tweedie"),
    "hinge": ("binary:hinge", None),
    "cox": ("survival:cox", None),
    "lambda_rank": ("rank:ndcg", "lambdarank"),
    "xendcg": (None, "rank_xendcg"),
    "pairwise_logistic": ("rank:pairwise", None),
    "softmax": ("multi:softprob", "multiclass"),
    "own": ("a function", "a function"),
}
RANKING = ("lambda_rank", "xendcg", "pairwise_logistic")
GROUPED = ("cox", *RANKING)  # take longer: measured on fewer rows
ELSEWHERE = ("squared_error", "softmax", "own")  # losses with lines of their own


class Case(NamedTuple):
    """A size of data, a loss, a depth, and numbers of rounds."""

    num_rows: int
    num_features: int
    loss: str = "squared_error"
    max_depth: int = 6
    low: int = 2  # the two numbers of rounds of the slope
    high: int = 8
    rounds: int = 0  # of the measures that are no slope
    predicted: int = 0  # rows of the measure "predict"
    num_classes: int = 0
    density: float = 1.0  # below 1: a sparse matrix with this share of stored entries
    categorical: bool = False  # a data frame whose columns all hold text categories
    candidates: str = ""  # "exact", "local", "curvature" or "local curvature"
    num_models: int = 0  # of the measure "many": tables of num_rows rows each


class Line(NamedTuple):
    """A ratio: jboost's median over the lowest of the peers'.

    Attributes:
      group: heading in the picture.
      label: what is shown beside the dot.
      reach, aim: target ratios; lower is better.
      figure: which of the numbers of a reading.
      subject: the source whose ratio it is.
      over: another source than the fastest peer.
    """

    group: str
    label: str
    reach: float | None = None
    aim: float | None = None
    figure: str = "time"
    subject: str = "jboost"
    over: str = ""


class Step(NamedTuple):
    """Readings of several sources that are taken in turn."""

    name: str
    measure: str
    case: Case
    sources: tuple[str, ...]
    lines: tuple[Line, ...]
    repeats: int = 5

    @property
    def fresh(self) -> bool:
        """Whether each reading needs a new process."""
        return self.measure in FRESH


FIGURES = {  # numbers of a reading and their units
    "train": {"time": "ms a round"},
    "cold": {"time": "s", "processor": "s"},
    "cold cv": {"time": "s", "processor": "s"},
    "memory": {"fit": "MiB", "predict": "MiB"},
    "new": {"one": "s of processor", "several": "s of processor"},
    "losses": {"time": "s", "processor": "s"},
    "sweep": {"time": "s", "processor": "s"},
    "server": {"time": "s", "processor": "s"},
    "processes": {"time": "ms a round"},
}
FRESH = tuple(name for name in FIGURES if name != "train")  # take new processes
PRINTED = (
    "memory",
    "new",
    "processes",
)  # these processes print their figures themselves
MILLISECONDS = {"time": "ms"}  # of all other measures
PEERS = (
    "xgboost", "xgboost-multi", "xgboost-1", "lightgbm", "lightgbm-1", "lightgbm-q",
    "sklearn",
)  # fmt: skip
BOOSTERS = ("jboost", "xgboost", "lightgbm")
TRAINERS = (*BOOSTERS, "lightgbm-q")

LARGE = Case(1_000_000, 28, low=3, high=15)
CLASSES = Case(100_000, 28, "softmax", low=2, high=8, num_classes=10)
FEW = Case(20_000, 20)
SMALL = Case(1_000, 10, rounds=100)
SPARSE = Case(200_000, 100, low=5, high=25)
GROUPS = TRAINING, PER_LOSS, SPLITS, WHOLE, COLD, MEMORY, PREDICTION, SPARSE_ROWS = (
    "Training, per round", "Training with other losses, 1M x 28, per round",
    "Split candidates, 100k x 10, per round", "From arrays to models, warm",
    "Cold process: import, fit 1k x 10, predict", "Peak memory / XGBoost's",
    "Prediction", "Prediction of sparse rows, 100 columns",
)  # fmt: skip


def time_losses(case: Case, losses: tuple[str, ...]) -> list[Step]:
    """Returns a step for each of the losses, with the peers that have it."""
    steps = []
    for loss in losses:
        theirs, other = LOSSES[loss]
        peers = zip(TRAINERS, ("jboost", theirs, other, other), strict=True)
        sources = tuple(name for name, objective in peers if objective)
        label = loss.replace("_", " ") + ", 100k x 28" * (loss in GROUPED)
        line = Line(PER_LOSS, label, 0.45, 0.35)
        chosen = case._replace(loss=loss)
        steps.append(Step(f"train {loss}", "train", chosen, sources, (line,), 3))
    return steps


def time_candidates() -> list[Step]:
    """Returns a step for each kind of split candidates."""
    steps = []
    for candidates, loss, label in (
        ("exact", "squared_error", "exact / XGBoost exact"),
        ("local", "squared_error", "local / XGBoost approx"),
        ("curvature", "logistic", "global, weighted / approx, logistic"),
        ("local curvature", "logistic", "local, weighted / approx, logistic"),
    ):
        case = Case(100_000, 10, loss, candidates=candidates)
        line = Line(SPLITS, label, 0.7, 0.4)
        steps.append(
            Step(f"train {candidates}", "train", case, ("jboost", "xgboost"), (line,))
        )
    return steps


def predict_few() -> list[Step]:
    """Returns a step for each small number of dense and of sparse rows."""
    steps = []
    peers = (*BOOSTERS, "lightgbm-1")
    for trees in (100, 500):
        for rows in (1, 10, 100):
            case = FEW._replace(rounds=trees, predicted=rows)
            line = Line(PREDICTION, f"{count(rows, 'row')}, {trees} trees", 1.0, 0.5)
            name = f"predict {rows}, {trees} trees"
            steps.append(Step(name, "predict", case, peers, (line,)))
    for density in (0.01, 0.1):
        for trees in (100, 500):
            for rows in (1, 1000, 200_000):
                case = SPARSE._replace(rounds=trees, predicted=rows, density=density)
                label = f"{count(rows, 'row')}, {density:.0%}, {trees} trees"
                line = Line(SPARSE_ROWS, label, 1.0, 0.3)
                name = f"predict sparse {rows}, {density:.0%}, {trees} trees"
                repeats = 5 if rows < 200_000 else 3
                sources = peers if rows == 1 else BOOSTERS
                steps.append(Step(name, "predict", case, sources, (line,), repeats))
    return steps


def count(number: int, noun: str) -> str:
    """Returns "1 row", "10 rows", "200k rows"."""
    shown = f"{number // 1000}k" if number >= 1000 else str(number)
    return f"{shown} {noun}{'s' * (number > 1)}"


def start_processes() -> list[Step]:
    """Returns the steps whose readings need a new process each."""
    steps = []
    for loss, classes, reach, aim in (
        ("squared_error", 0, 0.85, 0.6), ("logistic", 0, 1.2, 0.8),
        ("softmax", 3, 2.0, 1.0), ("softmax", 10, 2.0, 1.0),
    ):  # fmt: skip
        case = SMALL._replace(loss=loss, num_classes=classes)
        title = f"softmax of {classes}" if classes else loss.replace("_", " ")
        lines = (
            Line(COLD, f"{title}, wall time", reach, aim),
            Line(COLD, f"{title}, processor time", reach, aim, "processor"),
        )
        sources = ("jboost", "xgboost")
        steps.append(Step(f"cold {title}", "cold", case, sources, lines, 3))
    for loss, label in (
        ("squared_error", ""), ("logistic", ", logistic"),
        ("absolute_error", ", absolute error"), ("pseudo_huber", ", pseudo-Huber"),
    ):  # fmt: skip
        title = f"cross-validation{label} / xgboost.cv"
        lines = (
            Line(COLD, title, 1.2 if label else 0.7, 0.8 if label else 0.6),
            Line(COLD, f"{title}, processor time", figure="processor"),
        )
        case = SMALL._replace(loss=loss)
        steps.append(
            Step(f"cold cv{label}", "cold cv", case, ("jboost", "xgboost"), lines, 3)
        )
    for name, measure, case, label, goals in (
        ("cold sweep", "sweep", Case(5_000, 4, rounds=100),
         "sweep of 8 points / loop of xgboost.cv", (1.5, 0.7)),
        ("cold losses", "losses", SMALL,
         "20 new losses / XGBoost with jax gradients", (1.5, 1.0)),
        ("cold server", "server", Case(5_000, 28, rounds=100),
         "import, load, predict one row", (1.0, 0.7)),
    ):  # fmt: skip
        lines = (
            Line(COLD, label, *goals),
            Line(COLD, f"{label}, processor time", *goals, "processor"),
        )
        steps.append(Step(name, measure, case, ("jboost", "xgboost"), lines, 3))
    steps.append(
        Step("cold new losses", "new", SMALL._replace(rounds=10), ("jboost",), ())
    )
    cached = (
        Line(COLD, "logistic, programs cached", subject="jboost-cached"),
        Line(
            COLD, "logistic, programs cached, processor time",
            figure="processor", subject="jboost-cached",
        ),
    )  # fmt: skip
    sources, case = ("jboost-cached", "xgboost"), SMALL._replace(loss="logistic")
    steps.append(Step("cold cached", "cold", case, sources, cached, 3))
    for name, case in (("1M x 28", LARGE), ("100k x 28, 10 classes", CLASSES)):
        lines = (
            Line(MEMORY, f"{name}: fit", 0.9, 0.7, "fit"),
            Line(MEMORY, f"{name}: fit and predict", 0.9, 0.7, "predict"),
        )
        sources = ("jboost", "xgboost")
        steps.append(Step(f"memory {name}", "memory", case, sources, lines, 2))
    return steps


def time_small() -> list[Step]:
    """Returns the steps on tables of at most 20,000 rows, warm."""
    many = Case(500, 10, rounds=50, num_models=200)
    medium = Case(20_000, 8, rounds=100)
    frame = Case(20_000, 16, rounds=100, predicted=1, categorical=True)
    loops = (*BOOSTERS, "jboost-vmap", "xgboost-1", "lightgbm-1")
    return [
        make("one full tree", "tree", SMALL, ("jboost", "sklearn"),
             Line(WHOLE, "one full tree, 1k x 10 / scikit-learn", 1.0, 0.7)),
        make("fit 1k x 10", "fit", SMALL, TRAINERS,
             Line(WHOLE, "fit 1k x 10, 100 rounds", 1.0, 0.5)),
        make("cv 1k x 10", "cv", SMALL, BOOSTERS,
             Line(WHOLE, "5 folds of 1k x 10, 100 rounds", 1.0, 0.5)),
        make("many models", "many", many, loops,
             Line(WHOLE, "200 models of 500 x 10, loop of fit", 0.5, 0.2),
             Line(WHOLE, "200 models of 500 x 10, vmap over boost", 0.5, 0.2,
                  subject="jboost-vmap"),
             repeats=3),
        make("fit 20k x 8", "fit", medium, TRAINERS,
             Line(WHOLE, "fit 20k x 8, 100 rounds", 1.5, 0.7)),
        make("cv 20k x 8", "cv", medium, BOOSTERS,
             Line(WHOLE, "5 folds of 20k x 8, 100 rounds", 1.0, 0.5), repeats=3),
        *predict_few(),
        make("predict frame", "predict", frame, (*BOOSTERS, "lightgbm-1"),
             Line(PREDICTION, "1 row, data frame, 16 categorical", 1.0, 0.7)),
        make("shap", "shap", Case(20_000, 28, rounds=100, predicted=4000), BOOSTERS,
             Line(PREDICTION, "SHAP values, 4k rows, 100 trees", 0.2, 0.1),
             repeats=3),
    ]  # fmt: skip


def time_medium() -> list[Step]:
    """Returns the steps on tables of 100,000 and 200,000 rows."""
    label = "100k x 28, 10 classes"
    six = (*TRAINERS, "jboost-shared", "xgboost-multi")
    return [
        make("train wide", "train", Case(100_000, 100, low=5, high=25), TRAINERS,
             Line(TRAINING, "100k x 100", 0.45, 0.3)),
        make("train 1,000 classes", "train",
             Case(3_000, 20, "softmax", low=1, high=3, num_classes=1_000),
             ("jboost", "xgboost"),
             Line(TRAINING, "3k x 20, 1,000 classes", 1.0, 0.5), repeats=3),
        make("train classes", "train", CLASSES, six,
             Line(TRAINING, f"{label}, a tree each", 0.7, 0.4),
             Line(TRAINING, f"{label}, shared trees", 0.7, 0.4,
                  subject="jboost-shared"),
             repeats=4),
        *time_losses(CLASSES._replace(num_classes=0, high=26), GROUPED),
        *(
            make(f"train sparse {density:.0%}", "train",
                 SPARSE._replace(density=density), BOOSTERS,
                 Line(TRAINING, f"200k x 100, {density:.0%} stored", 0.9, 0.6),
                 repeats=4)
            for density in (0.01, 0.1)
        ),
        *time_candidates(),
        make("cv 100k x 28", "cv", Case(100_000, 28, rounds=20), BOOSTERS,
             Line(WHOLE, "5 folds of 100k x 28, 20 rounds", 1.0, 0.5), repeats=2),
    ]  # fmt: skip


def time_large() -> list[Step]:
    """Returns the steps on a million rows."""
    single = tuple(name for name in LOSSES if name not in (*GROUPED, *ELSEWHERE))
    deep = LARGE._replace(max_depth=10, low=2, high=6)
    return [
        make("train large", "train", LARGE, TRAINERS,
             Line(TRAINING, "1M x 28", 0.45, 0.35)),
        make("train levels", "train", LARGE, ("jboost", "jboost-levels"),
             Line(TRAINING, "1M x 28, a column of 1,000 levels / without", 1.2, 1.05,
                  subject="jboost-levels", over="jboost"), repeats=3),
        make("processes", "processes", LARGE._replace(low=4, high=24),
             ("jboost", "jboost-two"),
             Line(TRAINING, "1M x 28, two processes of one core / one of two", 1.3,
                  1.1, subject="jboost-two", over="jboost"), repeats=3),
        make("train deep", "train", deep, TRAINERS,
             Line(TRAINING, "1M x 28, depth 10", 0.7, 0.5), repeats=3),
        make("train own", "train", LARGE._replace(loss="own"),
             (*BOOSTERS, "jboost-built-in"),
             Line(TRAINING, "1M x 28, custom loss", 0.45, 0.35),
             Line(TRAINING, "1M x 28, custom loss / the equal built-in", 1.05, 1.0,
                  over="jboost-built-in"),
             repeats=4),
        *(
            make(f"predict large, {trees} trees", "predict",
                 LARGE._replace(rounds=trees, predicted=1_000_000),
                 ("jboost", "jboost-avx2", "xgboost"),
                 Line(PREDICTION, f"1M rows, {trees} trees / XGBoost", 0.3, 0.1),
                 Line(PREDICTION, f"1M rows, {trees} trees, AVX2 only / XGBoost",
                      0.7, 0.4, subject="jboost-avx2"),
                 repeats=3)
            for trees in (50, 500)
        ),
        make("fit 1M x 28", "fit", LARGE._replace(rounds=50), TRAINERS,
             Line(WHOLE, "fit 1M x 28, 50 rounds", 0.4, 0.3), repeats=2),
        *time_losses(LARGE._replace(low=2, high=8), single),
    ]  # fmt: skip


def make(
    name: str, measure: str, case: Case, sources: tuple[str, ...], *lines: Line,
    repeats: int = 5,
) -> Step:  # fmt: skip
    """Returns a step."""
    return Step(name, measure, case, sources, lines, repeats)


# New processes come first, while no other process holds much memory.
PLAN = (*start_processes(), *time_small(), *time_large(), *time_medium())
