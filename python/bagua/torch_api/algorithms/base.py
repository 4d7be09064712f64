"""The base classes of communication algorithms.

An algorithm decides which tensors are communicated, in which buckets, with which operations, and when. The defaults
communicate gradients: each bucket is sent as soon as all its gradients are computed, and ``backward`` returns when all
buckets have been received. A subclass overrides the hooks in which it differs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from bagua import hints
from bagua.codecs import Codec, Compression, raw_codec
from bagua.errors import BaguaError

from ..bucket import BaguaBucket
from ..model_engine import bucketing
from ..model_engine.algorithm_interface import WrappedModel as WrappedModel
from ..per_rank_state import require_own
from ..process_group import DTYPES, Communicator, ProcessGroup
from ..tensor import effective
from ._policy import ExchangePolicy


class AlgorithmImpl:
    """An algorithm at work on one model.

    The constructor takes a process group, followed by either an :class:`Algorithm` or the arguments of its constructor.
    The algorithm's options become attributes of this object.

    The model calls the hooks in this order. When the model is wrapped, and again when :meth:`need_reset` returns True:
    :meth:`init_tensors`, :meth:`tensors_to_buckets`, :meth:`init_operations` once per bucket, then the four methods
    ``init_*_hook``, which return the functions to call during training. In each step: the forward pre-hook, the
    backward hook once per gradient, the post-backward hook, the post-optimizer-step hook.
    """

    #: Weak reference to the model that this object communicates for. Set before any hook is called.
    _model: weakref.ref[Any] | None = None
    #: The algorithm's registered name. Saved in states, so that a state of another algorithm can be refused.
    name = ""
    #: True if operations add up and do not divide, because the model's engine divides by the sum of the ranks' weights.
    _only_adds = False
    # The first Algorithm subclass that this class implements. Used to make an algorithm from the constructor's
    # arguments.
    _algorithm: ClassVar[type[Algorithm] | None] = None

    def __init__(self, process_group: ProcessGroup, *options: Any, **named: Any) -> None:
        self.process_group = process_group
        #: The algorithm whose options this object has; None if it was made without any.
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
        # Algorithms written for the original Bagua construct their implementation without passing themselves.
        algorithm = self.algorithm or getattr(model, "algorithm", None)
        options = "" if algorithm is None else f": {algorithm!r}"
        where = "" if model is None else f" of model {model.bagua_module_name!r}"
        return f"<{type(self).__name__}{where}{options}>"

    def _attach(self, bagua_ddp: WrappedModel, name: str) -> None:
        """Connects this object to its model. Called once, with the model and the algorithm's registered name."""
        self._model = weakref.ref(bagua_ddp)
        self.name = name

    def _policy(self) -> ExchangePolicy:
        """Returns what the model's engine must know in addition to the public hooks. Called once."""
        return ExchangePolicy()

    @property
    def bagua_ddp(self) -> WrappedModel:
        """The model that this object communicates for. Raises BaguaError if the model no longer exists."""
        model: WrappedModel | None = self._model() if self._model is not None else None
        if model is None:
            raise BaguaError(f"the model that this {type(self).__name__} communicated for no longer exists")
        return model

    def need_reset(self) -> bool:
        """Returns True to rebuild tensors, buckets and operations before this forward, for example after a warm-up.

        Called before each training forward. All ranks must return the same value. A rebuild does not broadcast weights.
        """
        return False

    def init_tensors(self, bagua_ddp: WrappedModel) -> list[torch.Tensor]:
        """Registers the tensors to communicate, and returns them in the order in which they become ready.

        Called when the model is wrapped, and when :meth:`need_reset` returned True. The default registers the gradients
        of all parameters, in reverse order, because backward computes the last parameter's gradient first. The order
        must be the same on all ranks.

        - ``bagua_ddp``: The model's engine. ``bagua_ddp.bagua_build_params()`` has the names and parameters.
        """
        return bagua_ddp.exchange.register()

    def tensors_to_buckets(self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool) -> list[BaguaBucket]:
        """Returns the buckets in the order of communication: by default, one for each list in ``tensors``.

        Called after :meth:`init_tensors`.

        - ``tensors``: The tensors that :meth:`init_tensors` returned, in lists of about ``bucket_size`` bytes and of
          one dtype.
        - ``do_flatten``: The argument of ``with_bagua``. True moves the tensors of each bucket into one contiguous
          piece of memory, ``bucket.backend_tensor``.
        """
        group = self.process_group
        communicator = group.get_global_communicator() if self._policy().pads_buckets else None
        ranks = communicator.nranks() if isinstance(communicator, Communicator) else 1
        return [BaguaBucket(bucket, str(i), do_flatten, ranks, group=group) for i, bucket in enumerate(tensors)]

    def init_operations(self, bagua_ddp: WrappedModel, bucket: BaguaBucket) -> None:
        """Appends the operations that communicate a bucket, with ``bucket.append_..._op``. By default, appends none.

        Called once per bucket, after :meth:`tensors_to_buckets`. When all tensors of the bucket are ready, the
        communication thread runs the operations in this order.
        """

    def init_forward_pre_hook(self, bagua_ddp: WrappedModel) -> Callable[[Any], None]:
        """Returns the function to call before each training forward, with the tuple of the model's positional inputs.

        Called after :meth:`init_operations`, like the three methods below. The default function does nothing.
        """

        def hook(inputs: Any) -> None:
            pass

        return hook

    def init_backward_hook(self, bagua_ddp: WrappedModel) -> Callable[[str, torch.nn.Parameter], None]:
        """Returns the function to call when backward has computed a gradient on this rank.

        Its arguments are the parameter's name and the parameter. Not called under ``no_sync``. The default function
        marks the gradient ready. A function of your own does this with ``param.bagua_mark_communication_ready()``.
        """
        return bagua_ddp.exchange.arrived

    def init_post_backward_hook(self, bagua_ddp: WrappedModel) -> Callable[[], None]:
        """Returns the function to call when all gradients are computed, before ``backward`` returns.

        Not called under ``no_sync``. The default function marks the remaining gradients ready, waits until all buckets
        are communicated, and raises the errors of communication. A function of your own waits with
        ``bagua_ddp.backend.wait_pending_comm_ops()``.
        """
        return bagua_ddp.exchange.finish

    def init_post_optimizer_step_hook(self, bagua_ddp: WrappedModel) -> Callable[[torch.optim.Optimizer], None]:
        """Returns the function to call after each optimizer step, with the optimizer.

        Called for every optimizer that holds parameters of the model, including optimizers that ``with_bagua`` was not
        given. The default function does nothing for gradients.
        """
        return bagua_ddp.exchange.stepped

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs in addition to the states of the model and its optimizers.

        The values are numbers and tensors that ``torch.load(weights_only=True)`` accepts:

        - "algorithm": the algorithm's name.
        - "step": number of steps begun.
        - "round": number of times that the buckets were communicated.
        - "rank" and "world_size": this rank and the number of ranks in the group.
        - "members": the ranks that exchange with each other.
        - other entries, such as "error" with error feedback: dictionaries from parameter name to tensor.

        The state differs between ranks. Each rank saves its own, and loads it after ``with_bagua``, together with the
        states of the model and its optimizers.
        """
        ddp = self.bagua_ddp
        ddp.exchange.before_step()
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
        """Loads a state that :meth:`state_dict` returned. Not collective.

        Raises ValueError if the state belongs to another algorithm, does not fit the model, or contains entries that
        only another rank, or a group with other members, can load.
        """
        if state.get("algorithm") != self.name:
            raise ValueError(f"this is a state of algorithm {state.get('algorithm')!r}, not of {self.name!r}")
        own = self._tensors_of_state()
        remedy = "leave the algorithm's state out, and load the states of model and optimizers before with_bagua"
        require_own(state, self._ranks(), [kind for kind in own if kind in self._policy().rank_state], remedy)
        unknown = sorted(kind for kind, value in state.items() if isinstance(value, Mapping) and kind not in own)
        if unknown:
            raise ValueError(f"the state has {unknown}, which this model's algorithm does not use with its options")
        for kind, tensors in own.items():
            theirs = state.get(kind, {})
            if theirs.keys() != tensors.keys():
                differ = sorted(theirs.keys() ^ tensors.keys())
                raise ValueError(
                    f"the state's {kind!r} and this model do not have the same parameters: they differ in {differ}"
                )
            for name, tensor in tensors.items():
                if theirs[name].shape != tensor.shape or theirs[name].dtype != tensor.dtype:
                    raise ValueError(
                        f"the state's {kind!r} of {name!r} is {theirs[name].dtype}{list(theirs[name].shape)}, not "
                        f"{tensor.dtype}{list(tensor.shape)}"
                    )
        ddp = self.bagua_ddp
        with torch.no_grad():
            # Other ranks may be waiting for what this rank still owes. Sending it must not change the parameters, which
            # are already loaded.
            kept = [(param, param.detach().clone()) for _, param in ddp.bagua_build_params()]
            ddp.exchange.before_step()
            for param, values in kept:
                param.copy_(values)
            for kind, tensors in own.items():
                for name, tensor in tensors.items():
                    tensor.copy_(state[kind][name])
        ddp.restart(int(state["step"]))
        for bucket in ddp.bagua_buckets:
            bucket.backend_bucket.set_step(int(state["round"]))

    def _ranks(self) -> dict[str, Any]:
        """Returns the entries that say which rank the state belongs to: rank, world size and members of the group."""
        communicator = self.process_group.get_global_communicator()
        assert isinstance(communicator, Communicator)
        return {
            "rank": communicator.rank(),
            "world_size": communicator.nranks(),
            # Not every algorithm has the option ``hierarchical``.
            "members": communicator.members(getattr(self, "hierarchical", False)),
        }

    def _tensors_of_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns the tensors that :meth:`state_dict` copies, by kind and parameter name."""
        return tensors_of_buckets(self.bagua_ddp.bagua_buckets, {"error": "error"})


def check_codec(compression: Compression, bagua_ddp: WrappedModel) -> None:
    """Checks that a codec can encode the model's gradients.

    Raises TypeError if it cannot encode their dtype, and ValueError if its options do not fit their number. Both name a
    parameter.
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
    """Returns one bucket of weights per dtype. All weights are ready at once, so more buckets would not help."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in (tensor for bucket in tensors for tensor in bucket):
        by_dtype.setdefault(effective(tensor).dtype, []).append(tensor)
    return [BaguaBucket(bucket, str(i), do_flatten, group=group) for i, bucket in enumerate(by_dtype.values())]


def tensors_of_buckets(
    buckets: Sequence[BaguaBucket], attributes: Mapping[str, str]
) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the parts of the buckets' flat tensors, by kind and parameter name.

    ``attributes`` maps each kind to the attribute of a bucket that holds the flat tensor. A kind that no bucket has is
    left out.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for kind, attribute in attributes.items():
        for bucket in buckets:
            flat = getattr(bucket, attribute, None)
            if flat is not None:
                found.setdefault(kind, {}).update(bucket.parts_of(flat))
    return found


def _options_of(algorithm: Algorithm) -> dict[str, Any]:
    return {name: value for name, value in vars(algorithm).items() if not name.startswith("_")}


def _shown(options: Mapping[str, Any]) -> str:
    """Formats options as arguments of a call. Optimizers are shown as their class name."""
    texts = {name: type(v).__name__ if hasattr(v, "param_groups") else repr(v) for name, v in options.items()}
    return ", ".join(f"{name}={text}" for name, text in texts.items())


class Algorithm:
    """The user's choice of an algorithm and its options. One object may serve several models.

    :meth:`reify` makes the :class:`AlgorithmImpl` that does the work for one model.
    """

    # The implementation that :meth:`reify` makes. Its attributes include the options of this object.
    _implementation: ClassVar[type[AlgorithmImpl] | None] = None

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        implementation = cls._implementation
        if implementation is not None and "_algorithm" not in vars(implementation):
            implementation._algorithm = cls

    @property
    def needs_optimizers(self) -> bool:
        """True if the algorithm acts on optimizer steps. ``with_bagua`` must then be given the model's optimizers."""
        return False

    def reify(self, process_group: ProcessGroup) -> AlgorithmImpl:
        """Returns a new implementation of this algorithm for one model, which communicates with ``process_group``."""
        if self._implementation is None:
            raise NotImplementedError(f"{type(self).__name__} must override reify()")
        return self._implementation(process_group, self)

    @property
    def registered_name(self) -> str:
        """The name that this class is registered under, or the name of the class if it is not registered."""
        for name, entry in GlobalAlgorithmRegistry.items():
            if entry["algorithm"] is type(self):
                return name
        return type(self).__name__

    def describe(self) -> str:
        """Returns name and options as text. ``with_bagua`` checks that all ranks have the same text."""
        options = _options_of(self)
        if isinstance(codec := options.get("compression"), str) and codec != "auto":
            # Aliases of a codec must give the same text.
            options["compression"] = Codec(codec)
        return f"{self.registered_name}({_shown(options)})"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_shown(_options_of(self))})"

    @classmethod
    def options_from(cls, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
        """Returns options derived from the model's optimizers, for an algorithm that the user chose by name alone.

        Raises ValueError if the optimizers do not fit the algorithm.
        """
        return {}

    @classmethod
    def init(cls, name: str, **kwargs: Any) -> Algorithm:
        """Returns a new algorithm by its registered name. ``kwargs`` are its options.

        Raises ValueError for an unknown name, and TypeError if the registered function does not return an Algorithm.
        """
        made = GlobalAlgorithmRegistry.get(name)(**kwargs)
        if not isinstance(made, Algorithm):
            raise TypeError(f"{name!r} is registered with {made!r}, which is not an Algorithm")
        return made


class _Registry(dict[str, dict[str, Any]]):
    def register(self, name: str, algorithm: Callable[..., Algorithm], description: str | None = None) -> None:
        """Registers an algorithm.

        - ``name``: The new name. Raises ValueError if it is already registered.
        - ``algorithm``: A subclass of :class:`Algorithm`, or a function that returns one from keyword arguments.
        - ``description``: A sentence for people.
        """
        if not isinstance(name, str):
            raise TypeError(f"an algorithm's name is a str, not {name!r}")
        if name in self:
            raise ValueError(f"an algorithm {name!r} is already registered")
        self[name] = {"algorithm": algorithm, "description": description or ""}

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the class or function registered as ``name``, else ``default``. Raises ValueError without either."""
        found = super().get(name)
        if found is not None:
            return found["algorithm"]
        if default is not None:
            return default
        raise ValueError(hints.unknown_name("algorithm", str(name), self))

    def available_algorithms(self) -> list[str]:
        """Returns the registered names."""
        return list(self)

    def __str__(self) -> str:
        return f"Registered Algorithms: {', '.join(self)}"


#: All registered algorithms by name. :meth:`register` adds one, and :meth:`Algorithm.init` makes one by name.
GlobalAlgorithmRegistry = _Registry()


def chosen(algorithm: Algorithm | str, optimizers: Sequence[torch.optim.Optimizer]) -> Algorithm:
    """Returns the algorithm that a user chose for a model with these optimizers, by object or by registered name.

    Raises ValueError for an unknown name and TypeError for anything else.
    """
    if isinstance(algorithm, str):
        options_from = getattr(GlobalAlgorithmRegistry.get(algorithm), "options_from", Algorithm.options_from)
        return Algorithm.init(algorithm, **options_from(optimizers))
    if not isinstance(algorithm, Algorithm):
        raise TypeError(f"algorithm must be an Algorithm or the name of one, not {type(algorithm).__name__}")
    return algorithm
