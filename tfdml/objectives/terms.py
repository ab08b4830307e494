"""From a sum such as `am_softmax + 0.4 * jrs` to objectives: every loss, objective and kernel by
its name."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfdml.errors import UserError, check_choice, short_message
from tfdml.expressions import Call, Terms, shortened
from tfdml.losses.classification import ClassSimilarityLoss
from tfdml.mining.base import Relation
from tfdml.objectives import MetricLoss, Objective, ProxyLoss
from tfdml.registry import find, registered

# Each makes the graph of a training step larger; nobody has weighed so many against each other.
_MOST_TERMS = 20
_WRAPPERS = (Objective, MetricLoss, ProxyLoss)


def check_objectives(objectives: str | Terms) -> None:
    """Refuse what `build_objectives` would refuse of the names and of the arguments' names, before
    the data is known.

    Args:
        objectives: The sum of terms.

    Raises:
        UserError: An unknown name or argument, a kernel or an inner loss that cannot be made, too
            many terms, or none that counts.

    Example:
        >>> check_objectives("am_softmax + 0.4 * jrs")
        >>> check_objectives("jrs(level=pooled)")
        Traceback (most recent call last):
        tfdml.errors.UserError: `objectives='jrs(level=pooled)'`: jrs: no argument 'level'; it ...
    """
    _each_term(objectives, lambda weight, call: _read(call, {}))


def build_objectives(
    objectives: str | Terms,
    num_classes: int | None = None,
    relation: Relation | Callable | None = None,
    columns: int = 1,
) -> list[Objective]:
    """Return the objectives that a sum such as `am_softmax(margin=0.05) + 0.4 * jrs` describes.

    A loss on class similarities gets proxies for `num_classes` classes; a factor is the term's
    weight. Terms that provide representations come first, whatever the order written.

    Args:
        objectives: The sum.
        num_classes: How many training classes there are; needed for losses with proxies and targets
            of classes.
        relation: Which images belong together, for losses over pairs without `positives`; None for
            equal labels.
        columns: How many labels an image has.

    Raises:
        UserError: An unknown name or argument, a value that does not fit, too many terms, or none
            that counts; with a relation, a term that learns from classes; a term needs
            `num_classes`.

    Example:
        >>> [objective.name for objective in build_objectives("contrastive + 0.1 * ecaml")]
        ['contrastive', 'ecaml']
    """
    of_data: dict[str, Any] = {}
    if relation is not None:
        of_data = {"positives": relation, "label_columns": columns}
    built = _each_term(objectives, lambda weight, call: _build(call, weight, num_classes, of_data))
    for objective in built:
        if relation is not None and objective.positives is None:
            raise UserError(
                f"{objective.name} learns from classes: choose losses over pairs instead",
                objectives=...,
            )
    return sorted(built, key=lambda objective: not objective.provides)


def _each_term(objectives: str | Terms, make: Callable[[float, Call], Any]) -> list[Any]:
    """Return what is made of the weight and the call of each term."""
    terms = objectives
    if isinstance(terms, str):
        terms = Terms.parse(terms, "objectives")
    with _errors_within(f"`objectives={shortened(str(objectives))!r}`"):
        if len(terms) > _MOST_TERMS:
            raise UserError(f"{len(terms)} terms; {_MOST_TERMS} is the most that one loss may have")
        if not any(weight for weight, _ in terms):
            raise UserError("every term has the factor 0, so that there is nothing to learn")
        return [make(weight, call) for weight, call in terms]


@contextlib.contextmanager
def _errors_within(name: str, own_name: str = "") -> Iterator[None]:
    """Begin the messages of errors with a name; objectives begin theirs with their own."""
    try:
        yield
    except (TypeError, ValueError) as error:
        message = short_message(error, longest=1000).removeprefix(f"{own_name}: ")
        raise UserError(f"{name}: {message}") from error


def _read(call: Call, of_data: dict[str, Any]) -> tuple[type, dict]:
    """Return the class that a term names, and its arguments, whose names are those of the class.

    Args:
        call: The term.
        of_data: The arguments that the data gives each loss and objective that takes them, where
            the term does not.
    """
    cls = find("loss", call.name)
    arguments = {key: _argument(key, value, of_data) for key, value in call.arguments.items()}
    with _errors_within(call.name):
        if "num_classes" in arguments:
            raise UserError("leave num_classes out, the data says it")
        wrapper = _wrapper(cls)
        _check_arguments([wrapper, cls] if wrapper else [cls], arguments)
    arguments.setdefault("name", call.name)
    return cls, {**_taken_by(cls, of_data), **arguments}


def _taken_by(cls: type, of_data: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the data that a class takes."""
    names = inspect.signature(cls).parameters
    return {name: value for name, value in of_data.items() if name in names}


def _build(
    call: Call, weight: float, num_classes: int | None, of_data: dict[str, Any]
) -> Objective:
    cls, arguments = _read(call, of_data)
    with _errors_within(call.name, arguments["name"]):
        if (
            num_classes is None
            and "num_classes" in inspect.signature(_wrapper(cls) or cls).parameters
        ):
            raise UserError("it needs num_classes, the number of training classes")
        if _wrapper(cls):
            return _wrap(cls, arguments, weight, num_classes)
        if "num_classes" in inspect.signature(cls).parameters:
            arguments["num_classes"] = num_classes
        return cls(weight=weight, **arguments)


def _wrapper(cls: type) -> type | None:
    """Return what makes an objective of a loss; None for an objective."""
    if not issubclass(cls, keras.losses.Loss):
        return None
    return ProxyLoss if issubclass(cls, ClassSimilarityLoss) else MetricLoss


def _wrap(cls: type, arguments: dict, weight: float, num_classes: int | None) -> Objective:
    names = set(inspect.signature(cls).parameters)
    loss = cls(**{key: value for key, value in arguments.items() if key in names})
    extra = {key: value for key, value in arguments.items() if key not in names}
    extra.update(weight=weight, name=arguments["name"])
    if not issubclass(cls, ClassSimilarityLoss):
        return MetricLoss(loss, **extra)
    extra.setdefault("proxies_per_class", cls.proxies_per_class)
    return ProxyLoss(loss, num_classes, **extra)


#: The kinds of what losses are composed of, by their arguments.
_COMPONENTS = {"mining": "miner", "positives": "relation", "distance": "distance"}


def _check_arguments(classes: list[type], arguments: dict) -> None:
    """Refuse arguments that none of the classes takes, of an objective or of its wrapper and its
    loss."""
    accepted: set[str] = set()
    for cls in classes:
        accepted.update(inspect.signature(cls).parameters)
    accepted -= {"weight", "kwargs", "name", "num_classes"}
    if classes[0] in _WRAPPERS:
        accepted.discard("loss")
    for key in arguments:
        if key not in accepted | {"name", "num_classes"}:
            raise ValueError(f"no argument {key!r}; it has {', '.join(sorted(accepted))}")


def _argument(key: str, value: Any, of_data: dict[str, Any]) -> Any:
    """Make the kernels, losses and miners in an argument, such as
    `horde(loss=contrastive(margin=0.5))`."""
    if isinstance(value, list):
        return [_argument(key, item, of_data) for item in value]
    if isinstance(value, str) and key in ("loss", "kernels", "positives"):
        value = Call(value)  # bare names of miners are known to the losses
    if not isinstance(value, Call):
        return value
    if key in _COMPONENTS:
        # A word of a miner, such as `positives=hard`, names no relation.
        arguments = {
            name: item if isinstance(item, str) else _argument(name, item, of_data)
            for name, item in value.arguments.items()
        }
        return _made(find(_COMPONENTS[key], value.name), value, arguments)
    inner = {
        name: cls for name, cls in registered("loss").items() if issubclass(cls, keras.losses.Loss)
    }
    classes = {**registered("kernel"), **inner}
    check_choice("name", value.name, sorted(classes))
    arguments = {name: _argument(name, item, of_data) for name, item in value.arguments.items()}
    cls = classes[value.name]
    return _made(cls, value, {**_taken_by(cls, of_data), **arguments})


def _made(cls: Any, call: Call, arguments: dict[str, Any]) -> Any:
    """Return the object of a class; a function as it is."""
    with _errors_within(call.name):
        return cls(**arguments) if inspect.isclass(cls) else cls
