"""The codes of findings: what each one means, and how serious it is.

A code's letter says where it comes from: C from `Engine.check`, which reads a composition before it runs; G from
`handlers.Guards`, which watches a run; W from the engine and its handlers as they run. Codes are never used twice: one that is
dropped stays unused.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["CODES", "PRINTED", "REPEATS", "Severity"]

Severity = Literal["info", "warning", "error"]

CODES: dict[str, tuple[Severity, str]] = {
    # W0x: metrics and what monitors them
    "W01": ("warning", "a metric is monitored against its own direction"),
    "W02": ("warning", "a monitored metric is NaN, which is never an improvement"),
    "W03": ("warning", "a batch of an unknown class is counted as one sample"),
    "W04": ("warning", "the values of a metric are, or perhaps are, no means of batches"),
    "W05": ("warning", "Accuracy has a threshold for probabilities, but the scores are none"),
    "W06": ("warning", "a metric of the training is monitored although a validation measures some"),
    "W07": ("info", "the patience is longer than the run"),
    "W08": ("warning", "an improvement has to be larger than the metric itself"),
    "W09": ("info", "a look for mistakes has raised an error; it is skipped, and the run continues"),
    # W1x: steps and optimizers
    "W10": ("warning", "nothing is trained: no update has an optimizer, but the bounds are those of a training run"),
    "W11": (
        "warning",
        "parameters of the model are in no optimizer: a layer was made, replaced or unfrozen after it was built",
    ),
    "W12": ("warning", "steps were made, but no parameter got a gradient"),
    "W13": (
        "warning",
        "parameters in the optimizer got no gradient in an epoch; information if they are the smaller part",
    ),
    "W14": ("warning", "modules were put into eval mode during training and left in it"),
    "W15": ("warning", "weights are NaN, or the loss is"),
    "W16": ("warning", "gradients were cleared inside an accumulation window"),
    "W17": ("warning", "something else than the engine calls optimizer.step()"),
    "W18": ("warning", "the learning rate is 0 for an epoch, or negative"),
    "W19": ("warning", "steps are left out, because their gradients or losses are not finite, or far above the usual"),
    # W2x: data
    "W20": ("warning", "the samples of an evaluation are drawn with replacement, so that some are missing"),
    "W21": ("warning", "the data gives more batches than its length, or an evaluation's gives fewer"),
    "W22": ("warning", "a batch holds an object whose tensors are not moved to the device"),
    "W23": ("warning", "the data gives samples, or whole arrays, in place of batches"),
    "W24": ("warning", "workers draw from generators that a resumed run does not continue"),
    "W25": ("warning", "ranks that share data have other data each, of which a part is never used"),
    "W26": ("warning", "each worker reads all of the data set, so that samples come several times"),
    "W27": ("warning", "normalisation over batches of one sample"),
    "W28": ("warning", "the batches of the data were changed in place"),
    "W29": ("warning", "no step is made, since nothing returns a loss"),
    # W3x: checkpoints and resuming
    "W30": ("warning", "a checkpoint of what is trained leaves out nothing"),
    "W31": ("info", "a run resumes from a saved state"),
    "W32": ("warning", "a run resumes with other options, handlers or data than the run that saved the state"),
    "W33": ("warning", "entries of the checkpoint folder cannot be read"),
    "W34": ("warning", "a log is not the one that the loaded state continues, so that rows may be missing"),
    "W35": ("warning", "weights that were changed between load_state_dict and run are replaced by those of the state"),
    "W36": ("warning", "a run begins anew although the folder holds the state in which it was preempted"),
    "W37": ("warning", "a run ended, and a checkpoint that should save it wrote nothing"),
    "W38": ("warning", "another process writes to the same log, or has removed it"),
    "W39": (
        "warning",
        "what should be written is lost: a handler was never attached, nobody receives what is logged, or a file has no place "
        "for it",
    ),
    # W4x: how things are attached and connected
    "W40": ("warning", "what is logged cannot be written as it is, such as an image with values out of its range"),
    "W41": (
        "warning",
        "a receiver is never called, or not where it should be: a method lacks its `on`, or a score is written after those who "
        "monitor it have looked",
    ),
    "W42": ("warning", "a loss has parameters that no optimizer holds, and that are not trained"),
    "W43": ("info", "the parameters of a loss are trained, moved and saved with the model's"),
    "W44": ("warning", "one function is called twice at an event: it was connected, or defined and connected, twice"),
    "W45": ("warning", "`Engine.without` was called without `with`, so that nothing was disabled"),
    "W46": ("warning", "the user's own DistributedDataParallel runs over processes of which the engine knows nothing"),
    "W47": (
        "warning",
        "a state is saved that cannot be loaded, since a handler lacks the method, or torch refuses an object in it; or one that "
        "lacks what the forward or a handler changes",
    ),
    "W48": ("warning", "`Engine.on` was called and decorates no function"),
    "W49": ("warning", "a function or handler is connected to events that this engine never emits"),
    # W5x: evaluation
    "W50": ("warning", "the samples of an evaluation depend on random numbers, as if they were augmented"),
    "W51": ("warning", "an evaluator measures other weights than those that are trained"),
    "W52": ("info", "parts of the model are in eval mode as a training run begins"),
    "W53": ("warning", "an evaluator measures nothing"),
    "W54": ("warning", "predictions are collected in another order than that of the data"),
    "W55": ("warning", "an average of the weights consists mostly of those that the run began with"),
    "W56": ("warning", "an evaluator that is run by itself measures the weights in place of their averages"),
    "W57": ("warning", "modules are in training mode in an evaluation, or dropout is computed"),
    "W58": ("info", "a handler limits the data of this run"),
    "W59": ("info", "an evaluation, or the training, leaves out the last samples of its data"),
    "W60": ("warning", "the inputs of an evaluation are on another scale than those of the training"),
    # W6x: logs and progress, and more about runs
    "W61": ("warning", "a metric that should be shown is produced by nobody"),
    "W62": ("warning", "a logger on an evaluator starts its log again with each evaluation"),
    "W63": ("info", "the interval of a logger is longer than the run"),
    "W64": ("warning", "an accuracy has never exceeded that of always answering the most frequent class"),
    "W65": (
        "warning",
        "a loss depends on the position of the engine that computes it, and an evaluator computes it, too",
    ),
    "W66": ("warning", "a signal handler was replaced, so that a preemption is not noticed"),
    "W67": ("warning", "weights are loaded that are the model's own, and were not copied"),
    "W68": ("warning", "a function changes the weights as a run continues"),
    "W69": ("warning", "the hidden state is never carried over between chunks of time"),
    "W70": ("warning", "ranks that bring their own data have the same"),
    # W7x: what training changes: gradients, rates, averages
    "W71": ("warning", "two updates train the same parameters"),
    "W72": (
        "warning",
        "a loss gets something else than the logits, or the logarithms of probabilities, that it expects",
    ),
    "W73": ("warning", "an output and its targets are broadcast against each other in the loss"),
    "W74": ("warning", "the loss is divided by the length of the accumulation window, which is averaged over already"),
    "W75": ("warning", "parameters have gradients before the backward of a window's first batch"),
    "W76": ("warning", "losses or outputs are held with their graphs, so that memory grows"),
    "W77": ("warning", "targets lie where the loss expects none, or where the output of the last activation never is"),
    "W78": ("warning", "the global generator is seeded in each iteration"),
    "W79": ("warning", "the loss is over a single class, and always the same"),
    # W8x: receivers, studies, and further losses
    "W80": ("warning", "a receiver changes the loss that is reported, and not the one that is trained with"),
    "W81": ("warning", "the runs of a study are equal although their seeds differ"),
    "W82": (
        "warning",
        "the runs of a study begin with other handlers, weights or data than earlier runs of the same seed",
    ),
    "W83": ("warning", "a loss is a sum over the batch, where the batches of a window are averaged"),
    "W84": ("warning", "steps were made, but no weight changed"),
    "W85": ("warning", "a function returns a batch or a loss, which nobody uses"),
    "W86": ("warning", "a scheduler was built for an optimizer, and nobody steps it"),
    "W87": ("warning", "a scheduler is stepped by a function, and checkpoints lack its position"),
    "W88": ("warning", "a layer takes the samples of a batch as steps of time"),
    "W89": ("warning", "something else than its schedule changes a learning rate"),
    "W90": ("warning", "a loss is the negative of a distance, so that training makes it larger"),
    "W91": ("warning", "a function evaluates the model in training mode"),
    "W92": ("warning", "the loss depends on trainable tensors that no optimizer holds"),
    "W93": (
        "warning",
        "values of other samples or places are mixed: a reshape in place of a transpose, a softmax over the samples",
    ),
    "W94": ("warning", "a step of a recurrent layer is used that has seen one step only, or padding"),
    "W95": ("warning", "the loss is computed over padding"),
    "W96": ("warning", "batches with different numbers of targets count alike in a mean over targets"),
    "W97": ("warning", "the first loss is far above that of guessing"),
    "W98": ("warning", "the targets are among the inputs"),
    "W99": ("warning", "a term of the loss has no gradient"),
    # C: what `Engine.check` finds before a run
    "C01": ("warning", "a metric is monitored that nobody produces"),
    "C02": ("info", "metrics are produced that nobody reads"),
    "C03": (
        "warning",
        "two handlers use one thing at one event, phase and rank, so that their order of attaching matters",
    ),
    "C04": ("warning", "gradients are clipped twice"),
    "C05": ("warning", "a schedule counts in another unit than it was written for"),
    "C06": ("warning", "a schedule is longer or shorter than the run"),
    "C07": ("warning", "an optimizer holds parameters that the model does not have"),
    "C08": ("warning", "trainable parameters are held by no optimizer"),
    "C09": ("warning", "parameters are frozen"),
    "C10": ("warning", "two handlers write one file"),
    "C11": ("warning", "a checkpoint is called the best, but is not selected by a metric"),
    "C12": ("warning", "batches are on another device than the model, and nothing moves them"),
    "C13": ("info", "training data is not shuffled"),
    "C14": ("warning", "the validation data is the training data"),
    "C15": ("warning", "an evaluator shares no parameters with the model that is trained"),
    "C16": ("warning", "random augmentation comes from generators that a resumed run does not restore"),
    "C17": ("warning", "an interval does not come up in this run"),
    "C18": ("warning", "weights are averaged, but not within this run"),
    "C19": ("info", "patience is longer than the run"),
    "C20": ("warning", "an evaluation measures nothing"),
    "C21": ("warning", "the last batch has one sample, of which BatchNorm has no variance"),
    "C22": ("warning", "an accumulation window is longer than an epoch"),
    "C23": ("info", "a schedule changes the rates of some optimizers only"),
    "C24": ("warning", "data that can be read only once is used for several epochs"),
    "C25": ("warning", "a function clips gradients that are still scaled for float16"),
    "C26": ("warning", "a function clips gradients where there are none, or parts of a window"),
    "C27": ("warning", "a model holds trainable tensors or layers where PyTorch does not find them"),
    "C28": ("warning", "an optimizer has an option with which no training converges"),
    "C29": ("warning", "labels are smoothed twice"),
    "C30": ("warning", "the process was launched as one of several, and nothing connects them"),
    "C31": ("warning", "a preemption would stop the run without saving it"),
    "C32": ("warning", "weights are trained in float16"),
    "C33": ("warning", "a layer lets nothing through, or begins with units that stay alike"),
    "C34": ("warning", "a normalisation layer keeps the statistics of almost no batch, or of the last one only"),
    "C35": ("warning", "an attribute was set on a module that PyTorch does not read there"),
    "C36": ("warning", "one layer stands at several places, which share its weights"),
    "C37": ("warning", "linear layers follow each other without an activation between them"),
    "C38": ("warning", "a handler for several processes is attached in a notebook, which is one process"),
    "C39": ("info", "a guard learns for longer than the run lasts what is usual"),
    "C40": ("info", "a name is taken for that of the validation's metric"),
    "C41": ("warning", "there are more processes than compute shards"),
    "C42": ("info", "a function is called for the shards of its own process only"),
    # G: what `handlers.Guards` finds in a run
    "G01": ("warning", "parameters in the optimizer have no gradient; information if they are the smaller part"),
    "G02": ("warning", "all gradients are zero"),
    "G03": ("warning", "a step does not change the weights"),
    "G04": ("warning", "the learning rate is 0"),
    "G05": (
        "warning",
        "parameters of the model are in no optimizer: a layer was made, replaced or unfrozen after it was built",
    ),
    "G06": ("warning", "modules are in eval mode in training"),
    "G07": ("warning", "dropout is active in an evaluation"),
    "G08": ("warning", "the statistics of normalisation layers move in an evaluation"),
    "G09": ("warning", "the weights differ between ranks"),
    "G10": ("warning", "gradients are left from an iteration before: they were not cleared"),
    "G11": ("warning", "the same batch comes again and again"),
    "G12": ("warning", "labels are outside of the range of the classes"),
    "G13": ("info", "the inputs are not normalised"),
    "G14": ("warning", "inputs or the loss are NaN or infinite"),
    "G15": ("warning", "each batch has labels of one class; information if it is always the same"),
    "G16": ("warning", "all samples have the same output"),
    "G17": ("warning", "the loss is exactly the same for different batches"),
    "G18": ("warning", "the learning rate has fallen to almost nothing before the middle of the run"),
    "G19": ("warning", "the gradients have grown a million times"),
    "G20": ("warning", "something else than the engine calls optimizer.step()"),
    "G21": ("warning", "the statistics of frozen normalisation layers move"),
    "G22": ("warning", "only normalisation layers are trained, and the last layer is frozen"),
    "G23": ("warning", "a spectral norm is evaluated before its power iteration has run"),
    "G24": ("info", "the loss of an epoch is that of guessing"),
}
"""For each code its default severity and what it means, in words that fit every case of it."""

PRINTED = frozenset(
    ("W04", "W06", "W13", "W47", "W58", "W59", "C06", "C13", "C17", "C19", "C40", "G01", "G13", "G15", "G24")
)
"""Codes whose information is printed as one line on stderr when it is found in a run, since it is about what the run does."""

REPEATS: dict[str, tuple[str, ...]] = {
    "W11": ("C08", "G05"),
    "W12": ("G01", "G03", "W92"),
    "W14": ("G06",),
    "W15": ("G14",),
    "W53": ("C20",),
    "W57": ("G07", "G08"),
    "W37": ("C01", "C17"),
    "W92": ("W42", "C27"),
}
"""What a code repeats: after one of these in the same run, it is listed as information, and does not warn again."""
