"""The paper's tables and figures, one module each: runs, measures, and the numbers that the paper reports."""

from calm.paper.experiment import Experiment
from calm.paper.experiments import (
    alpha,
    autoencoder_ablation,
    autoencoder_scale,
    brier_correlation,
    chunk_size,
    heads,
    kl_weight,
    latent_size,
    main,
    model_input,
    samples,
    sampling_steps,
    temperature_tradeoff,
    temperature_vs_transformer,
    training_curves,
)

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        main,
        chunk_size,
        training_curves,
        brier_correlation,
        autoencoder_ablation,
        kl_weight,
        latent_size,
        autoencoder_scale,
        heads,
        sampling_steps,
        samples,
        alpha,
        model_input,
        temperature_tradeoff,
        temperature_vs_transformer,
    )
}
