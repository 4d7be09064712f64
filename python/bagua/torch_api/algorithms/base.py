"""What an algorithm is: which tensors are communicated, in which buckets, with which operations, and when.

The defaults communicate gradients: a bucket goes as soon as its gradients are there, and backward returns when all have
arrived. An algorithm replaces what it does differently.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from bagua import hints
from bagua.codecs import Codec, Compression, raw_codec
from bagua.errors import BaguaError

from ..bucket import BaguaBucket
from ..model_engine import bucketing
from ..model_engine.exchange_interface import Exchange
from ..model_engine.exchange_interface import WrappedModel as WrappedModel
from ..model_engine.gradients import GradientExchange
from ..model_engine.sparse import SparseGradientExchange, sparse_parameters
from ..process_group import DTYPES, Communicator, ProcessGroup, ReduceOp
from ..rank_state import require_own
from ..tensor import effective


class AlgorithmImpl:
    """An algorithm at work on one model. The hooks are asked for once, after the buckets are registered.

    It is made with a process group and an algorithm, or the arguments of one: the options become attributes.
    """

    #: The model that it communicates for; set before anything else is called.
    _model: weakref.ref[Any] | None = None
    #: Under which name it was registered; in states, so that another algorithm's is refused.
    name = ""
    #: Whether a process may come into a running elastic job with it.
    comes_back = False
    #: Whether :meth:`forward_ends`, :meth:`backward_begins`, :meth:`backward_ends` and :meth:`optimizer_step_ends` are
    #: called.
    hears_forward_and_backward = False
    #: Whether it keeps what it derived from the weights: others that are loaded without its state are then an error.
    keeps_weights = False
    #: Whether that is also so for weights that are assigned between ``with_bagua`` and the first step.
    begins_equal = False
    # Whether buckets are padded to a multiple of the group's ranks.
    _pads_buckets = False
    # Entries of its state that are of use to the rank that saved them only, among the same members.
    _kinds_of_one_rank: ClassVar[tuple[str, ...]] = ("error",)

    # The first algorithm that it is the implementation of.
    _algorithm: ClassVar[type[Algorithm] | None] = None

    def __init__(self, process_group: ProcessGroup, *options: Any, **named: Any) -> None:
        self.process_group = process_group
        #: Whose options it has.
        self.algorithm: Any = None
        if options and isinstance(options[0], Algorithm):
            (self.algorithm,) = options
        elif self._algorithm is not None:
            self.algorithm = self._algorithm(*options, **named)
        elif options or named:
            raise TypeError(f"{type(self).__name__} has no options")
        self.__dict__.update({} if self.algorithm is None else _options_of(self.algorithm))

    def __repr__(self) -> str:
        model = self._model() if self._model is not None else None
        # An implementation for the original's interface was not given its algorithm.
        algorithm = self.algorithm or getattr(model, "algorithm", None)
        options = "" if algorithm is None else f": {algorithm!r}"
        where = "" if model is None else f" of model {model.bagua_module_name!r}"
        return f"<{type(self).__name__}{where}{options}>"

    def attach(self, bagua_ddp: WrappedModel, name: str) -> None:
        """Called once, with the model that it communicates for and the algorithm's name."""
        self._model = weakref.ref(bagua_ddp)
        self.name = name

    @property
    def bagua_ddp(self) -> WrappedModel:
        """The model that it communicates for. BaguaError when that exists no longer."""
        model: WrappedModel | None = self._model() if self._model is not None else None
        if model is None:
            raise BaguaError("this algorithm's model exists no longer")
        return model

    def check(self, bagua_ddp: WrappedModel) -> None:
        """Refuses a model that it cannot train, before any communication; the other ranks get MismatchError."""

    def end(self) -> None:
        """Called when the model is wrapped anew or no longer; maybe twice, and not when its process ends."""

    def need_reset(self) -> bool:
        """Asked before each training forward: True has tensors, buckets and operations made anew. Nothing is
        broadcast.
        """
        return False

    def compared_step(self, bagua_ddp: WrappedModel) -> int:
        """Number, from 1 on, of a step that communicates, which is a MismatchError where it is another one on another
        rank, as after a state that was loaded on some ranks only; 0 where it may be. Here: of each exchange of weights;
        of gradients, how often a rank's optimizer stepped without a backward.
        """
        return bagua_ddp.empty_steps if bagua_ddp.exchange.needs_gradients else bagua_ddp.step + 1

    def communicates(self, step: int) -> bool:
        """True if the step of this number, counted from 0, communicates. If so, each bucket has to be communicated in
        it: BaguaError if one was not.
        """
        return True

    def buffers_due(self, step: int) -> bool:
        """True if rank 0's buffers travel in this step: after its backward if gradients are exchanged, else before its
        first forward.
        """
        return self.communicates(step)

    def before_step(self, bagua_ddp: WrappedModel) -> None:
        """Called before a step begins, and before the model is closed: does what the last step left undone, as its
        optimizer was never called.
        """
        bagua_ddp.exchange.before_step()

    def drop(self, bagua_ddp: WrappedModel) -> bool:
        """Called instead of :meth:`before_step` when the model was collected, at another moment on each rank: waits for
        what this rank has begun, and begins nothing. Whether something was left undone.
        """
        return bagua_ddp.exchange.drop()

    def before_optimizer_step(self, bagua_ddp: WrappedModel, optimizer: torch.optim.Optimizer) -> None:
        """Called before each step of an optimizer that holds parameters of the model, given to it or not."""
        bagua_ddp.exchange.before_optimizer_step(optimizer)

    def optimizer_step_ends(self, bagua_ddp: WrappedModel) -> None:
        """Called after each such step, also when it raised: then when the exception is freed."""

    def forward_begins(self, bagua_ddp: WrappedModel, *, with_grad: bool) -> None:
        """Called last before each forward, evaluation too. ``with_grad``: in training, with gradients enabled."""

    def forward_ends(self, bagua_ddp: WrappedModel, output: Any) -> None:
        """Called after each forward with what it returned, also when it raised: then with None."""

    def backward_begins(self, bagua_ddp: WrappedModel) -> None:
        """Called at the first gradient of each backward, also under ``no_sync``."""

    def backward_ends(self, bagua_ddp: WrappedModel) -> None:
        """Called when a backward that has begun so is over, also when it raised."""

    def before_load(self, bagua_ddp: WrappedModel) -> None:
        """Called before ``load_state_dict`` of the model. BaguaError, before anything is changed, where this is no time
        for it.
        """
        bagua_ddp.exchange.before_load()

    def model_state_dict(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The state of the model, which ``read`` returns; copies, where weights also change beside the training."""
        return read()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Inside, this rank's weights do not change beside the training. Not collective."""
        return contextlib.nullcontext()

    def make_exchange(self, bagua_ddp: WrappedModel) -> Exchange:
        """What travels: the gradients, unless this is replaced. Called before :meth:`init_tensors`, each time."""
        if sparse := sparse_parameters(bagua_ddp.module, bagua_ddp.parameters):
            return SparseGradientExchange(bagua_ddp, sparse, self.sparse_op() or ReduceOp.SUM)
        return GradientExchange(bagua_ddp)

    def init_tensors(self, bagua_ddp: WrappedModel) -> list[torch.Tensor]:
        """The tensors to communicate, registered, in the order in which they become ready."""
        return bagua_ddp.exchange.register()

    def tensors_to_buckets(self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        """One bucket for each list."""
        group = self.process_group
        communicator = group.get_global_communicator() if self._pads_buckets else None
        ranks = communicator.nranks() if isinstance(communicator, Communicator) else 1
        return [BaguaBucket(bucket, str(i), do_flatten, ranks, group=group) for i, bucket in enumerate(tensors)]

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """Appends the operations to a bucket."""

    def sparse_op(self) -> ReduceOp | None:
        """How sparse gradients are combined: SUM or AVG. ``None``: a model that has some is refused.

        Asked once. The default hooks do it, after the buckets.
        """
        return None

    def init_forward_pre_hook(self, bagua_ddp: WrappedModel) -> Callable[[Any], None]:
        """Called with the model's inputs before each training forward."""

        def hook(inputs: Any) -> None:
            pass

        return hook

    def init_backward_hook(self, bagua_ddp: WrappedModel) -> Callable[[str, torch.nn.Parameter], None]:
        """Called with name and parameter when a gradient has its final local value."""
        return bagua_ddp.exchange.arrived

    def init_post_backward_hook(self, bagua_ddp: WrappedModel) -> Callable[[], None]:
        """Called when the whole backward is done, before it returns."""
        return bagua_ddp.exchange.finish

    def init_post_optimizer_step_hook(self, bagua_ddp: WrappedModel) -> Callable[[torch.optim.Optimizer], None]:
        """Called with the optimizer after each step of one that holds parameters of the model, given to it or not."""
        return bagua_ddp.exchange.stepped

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the model's and the optimizers' states: numbers and tensors that
        ``torch.load(weights_only=True)`` takes.

        "algorithm" is the algorithm's name, "step" how many steps began, "round" how often a bucket was communicated,
        "rank" and "world_size" are this rank's in the group, and "members" the ranks that exchange with each other;
        other entries are dictionaries by parameter name, such as "error" with error feedback. It differs by rank: each
        rank saves and loads its own, after ``with_bagua`` and with the states of model and optimizers.
        """
        ddp = self.bagua_ddp
        self.before_step(ddp)
        buckets = ddp.bagua_buckets
        state: dict[str, Any] = {
            "algorithm": self.name,
            "step": ddp.step + 1,
            "round": buckets[0].backend_bucket.step if buckets else 0,
            **self._ranks(),
        }
        for kind, tensors in self._tensors_of_state().items():
            state[kind] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` returned. ValueError for another algorithm's, which it names, for entries
        that do not fit the model, and for entries that belong to another rank, or to other ranks. Not collective.
        """
        if state.get("algorithm") != self.name:
            raise ValueError(f"this is a state of algorithm {state.get('algorithm')!r}, not of {self.name!r}")
        own = self._tensors_of_state()
        remedy = "leave the algorithm's state out, and load the states of model and optimizers before with_bagua"
        require_own(state, self._ranks(), [kind for kind in own if kind in self._kinds_of_one_rank], remedy)
        unknown = sorted(kind for kind, value in state.items() if isinstance(value, Mapping) and kind not in own)
        if unknown:
            raise ValueError(f"the state has {unknown}, for which this model's algorithm has other options")
        for kind, tensors in own.items():
            theirs = state.get(kind, {})
            if theirs.keys() != tensors.keys():
                differ = sorted(theirs.keys() ^ tensors.keys())
                raise ValueError(f"the state's {kind!r} and this model differ in {differ}")
            for name, tensor in tensors.items():
                if theirs[name].shape != tensor.shape or theirs[name].dtype != tensor.dtype:
                    raise ValueError(
                        f"the state's {kind!r} of {name!r} is {theirs[name].dtype}{list(theirs[name].shape)}, not "
                        f"{tensor.dtype}{list(tensor.shape)}"
                    )
        ddp = self.bagua_ddp
        with torch.no_grad():
            # The other ranks wait for what this one owes; it must not change the parameters, which are loaded already.
            kept = [(param, param.detach().clone()) for _, param in ddp.bagua_build_params()]
            self.before_step(ddp)
            for param, values in kept:
                param.copy_(values)
            for kind, tensors in own.items():
                for name, tensor in tensors.items():
                    tensor.copy_(state[kind][name])
        ddp.restart(int(state["step"]))
        for bucket in ddp.bagua_buckets:
            bucket.backend_bucket.set_step(int(state["round"]))

    def _ranks(self) -> dict[str, Any]:
        """Whose state this is: rank, size and members of the group."""
        communicator = self.process_group.get_global_communicator()
        assert isinstance(communicator, Communicator)
        return {
            "rank": communicator.rank(),
            "world_size": communicator.nranks(),
            # An option that some algorithms have.
            "members": communicator.members(getattr(self, "hierarchical", False)),
        }

    def _tensors_of_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of :meth:`state_dict` themselves, by kind and parameter name."""
        return tensors_of_buckets(self.bagua_ddp.bagua_buckets, {"error": "error"})


def check_codec(compression: Compression, bagua_ddp: WrappedModel) -> None:
    """TypeError for elements that the codec does not encode, and ValueError for a number of them that its options do
    not fit; both with the name of a parameter.
    """
    codec = raw_codec(compression)
    if codec is None:
        return
    parameters = bagua_ddp.bagua_build_params()
    names = {id(param): name for name, param in parameters}
    for bucket in bucketing.split([param for _, param in reversed(parameters)], bagua_ddp.bucket_size):
        try:
            codec.encoded_bytes(sum(param.numel() for param in bucket), DTYPES[bucket[0].dtype], 1)
        except (TypeError, ValueError) as error:
            raise type(error)(f"parameter {names[id(bucket[0])]!r}: {error}") from error


def one_bucket_per_dtype(
    tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool, group: ProcessGroup
) -> list[BaguaBucket]:
    """Buckets of weights, which are all there at once: smaller ones could go no earlier."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in (tensor for bucket in tensors for tensor in bucket):
        by_dtype.setdefault(effective(tensor).dtype, []).append(tensor)
    return [BaguaBucket(bucket, str(i), do_flatten, group=group) for i, bucket in enumerate(by_dtype.values())]


def tensors_of_buckets(
    buckets: Sequence[BaguaBucket], attributes: Mapping[str, str]
) -> dict[str, dict[str, torch.Tensor]]:
    """Parts of flat tensors that buckets have in these attributes (values), by kind (keys) and parameter name.

    A kind that no bucket has is left out.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for kind, attribute in attributes.items():
        for bucket in buckets:
            flat = getattr(bucket, attribute, None)
            if flat is not None:
                found.setdefault(kind, {}).update(bucket.parts_of(flat))
    return found


def _options_of(algorithm: Algorithm) -> dict[str, Any]:
    """The options by name."""
    return {name: value for name, value in vars(algorithm).items() if not name.startswith("_")}


def _shown(options: Mapping[str, Any]) -> str:
    """Options as arguments of a call. Of an optimizer only its class is shown."""
    texts = {name: type(v).__name__ if hasattr(v, "param_groups") else repr(v) for name, v in options.items()}
    return ", ".join(f"{name}={text}" for name, text in texts.items())


class Algorithm:
    """What a user chooses; :meth:`reify` puts it to work on a process group. One object may serve several models."""

    # What it is at work: made with a process group and this object, whose options become attributes.
    _implementation: ClassVar[type[AlgorithmImpl] | None] = None

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        implementation = cls._implementation
        if implementation is not None and "_algorithm" not in vars(implementation):
            implementation._algorithm = cls

    @property
    def needs_optimizers(self) -> bool:
        """Whether it acts on the steps of the model's optimizers, so that ``with_bagua`` must be given them."""
        return False

    def reify(self, process_group: ProcessGroup) -> AlgorithmImpl:
        """A fresh implementation."""
        if self._implementation is None:
            raise NotImplementedError(f"{type(self).__name__}.reify")
        return self._implementation(process_group, self)

    @property
    def registered_name(self) -> str:
        """The name under which its class is registered; the class's own name when it is not."""
        for name, entry in GlobalAlgorithmRegistry.items():
            if entry["algorithm"] is type(self):
                return name
        return type(self).__name__

    def describe(self) -> str:
        """Name and options; ``with_bagua`` compares it between the ranks."""
        options = _options_of(self)
        if isinstance(codec := options.get("compression"), str) and codec != "auto":
            # One codec has one description, by whichever of its names it was given.
            options["compression"] = Codec(codec)
        return f"{self.registered_name}({_shown(options)})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_shown(_options_of(self))})"

    @classmethod
    def options_from(cls, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """Returns the options that an algorithm takes from the model's optimizers when it is chosen by its name alone.
        ValueError if they do not fit.
        """
        return {}

    @classmethod
    def init(cls, name: str, **kwargs: Any) -> Algorithm:
        """The algorithm registered under a name. ValueError for an unknown name."""
        made = GlobalAlgorithmRegistry.get(name)(**kwargs)
        if not isinstance(made, Algorithm):
            raise TypeError(f"{name!r} is registered with {made!r}, which is not an Algorithm")
        return made


class _Registry(dict[str, dict[str, Any]]):
    """Algorithms by name."""

    def register(self, name: str, algorithm: Callable[..., Algorithm], description: str | None = None) -> None:
        """Adds one. A name that is taken is an error."""
        if not isinstance(name, str):
            raise TypeError(f"an algorithm's name is a str, not {name!r}")
        if name in self:
            raise ValueError(f"an algorithm {name!r} is already registered")
        self[name] = {"algorithm": algorithm, "description": description or ""}

    def get(self, name: str, default: Any = None) -> Any:
        """The class or function that makes the algorithm of this name. ValueError without it or a default."""
        found = super().get(name)
        if found is not None:
            return found["algorithm"]
        if default is not None:
            return default
        raise ValueError(hints.unknown_name("algorithm", str(name), self))

    def available_algorithms(self) -> list[str]:
        """The registered names."""
        return list(self)

    def __str__(self) -> str:
        return f"Registered Algorithms: {', '.join(self)}"


#: The algorithms by their names: `register` adds one, `Algorithm.init` makes one.
GlobalAlgorithmRegistry = _Registry()


def chosen(algorithm: Algorithm | str, optimizers: Sequence[torch.optim.Optimizer]) -> Algorithm:
    """Returns the algorithm that a user has chosen for a model with these optimizers: an object, or a registered name.
    ValueError for an unknown name, TypeError for anything else.
    """
    if isinstance(algorithm, str):
        options_from = getattr(GlobalAlgorithmRegistry.get(algorithm), "options_from", Algorithm.options_from)
        return Algorithm.init(algorithm, **options_from(optimizers))
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"algorithm must be an Algorithm or the name of one, not {type(algorithm).__name__}")
    return algorithm
