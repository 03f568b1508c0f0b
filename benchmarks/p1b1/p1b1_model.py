"""P1B1's networks: autoencoder (ae), variational (vae), conditioned on the cancer type (cvae).

The encoder has the dense layers of ``--dense``, and the decoder has them in reverse. Between them
is the latent vector: in ae, the output of a layer with the inner activation, unless another is set;
in vae and cvae, a sample around ``z_mean``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.models.initializers import initial_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.parameters.parameter_set import ParameterSet


def latent_layer(params: ParameterSet) -> str:
    """Returns the name of the layer whose output is the compressed profile."""
    return "latent" if params["model"] == "ae" else "z_mean"


def build_autoencoder(params: ParameterSet, num_features: int, num_types: int) -> Any:
    """Returns the model; its input is the profile and, in cvae, the one-hot cancer type."""
    import keras
    from keras import layers

    from candle_p1.models.fast.layers import Dense

    profile = layers.Input((num_features,), name="profile")
    inputs, condition = [profile], []
    if params["model"] == "cvae":
        condition = [layers.Input((num_types,), name="cancer_type")]
        inputs += condition

    def join(tensor: Any) -> Any:
        return layers.Concatenate()([tensor, *condition]) if condition else tensor

    units = params["dense"] or []
    encoded = _dense_layers(join(profile), units, params)
    latent = _latent(encoded, params, num_features)
    decoded = _dense_layers(join(latent), list(reversed(units)), params)
    output = Dense(
        num_features,
        activation=params["out_activation"],
        kernel_initializer=initial_weights(params),
        dtype=keras.config.floatx(),  # the loss stays in float32 under mixed precision
    )
    return keras.Model(inputs if condition else profile, output(decoded), name="p1b1")


def _latent(encoded: Any, params: ParameterSet, num_features: int) -> Any:
    from candle_p1.models.fast.layers import Dense

    size = params["latent_dim"]
    if params["model"] == "ae":
        return Dense(
            size,
            activation=params["latent_activation"] or params["activation"],
            kernel_initializer=initial_weights(params),
            name="latent",
        )(encoded)
    from candle_p1.models.layers import SampleNormal

    mean = Dense(size, name="z_mean")(encoded)
    log_variance = Dense(size, name="z_log_var")(encoded)
    # The cross-entropy is a mean over the features, so the divergence is divided by their number.
    return SampleNormal(params["epsilon_std"], 1 / num_features, name="z")([mean, log_variance])


def _dense_layers(tensor: Any, units: Sequence[int], params: ParameterSet) -> Any:
    from keras import layers

    from candle_p1.models.fast.layers import Dense

    for size in units:
        before = tensor
        tensor = Dense(
            size, activation=params["activation"], kernel_initializer=initial_weights(params)
        )(tensor)
        if params["residual"] and before.shape == tensor.shape:
            tensor = layers.Add()([tensor, before])
        if params["batch_normalization"]:
            tensor = layers.BatchNormalization()(tensor)
        if params["dropout"]:
            dropout = layers.AlphaDropout if params["alpha_dropout"] else layers.Dropout
            tensor = dropout(params["dropout"])(tensor)
    return tensor
