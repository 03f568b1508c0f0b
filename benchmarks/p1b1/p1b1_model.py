"""P1B1's networks: autoencoder (ae), variational (vae), conditioned on the cancer type (cvae).

The encoder has the dense layers of ``--dense``, and the decoder has them in reverse. Between them
is the latent vector: in ae, the output of a layer with the inner activation, unless another is set;
in vae and cvae, a sample around ``z_mean``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from candle_p1.models.networks import initial_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from candle_p1.parameters.parameter_set import ParameterSet


def encoder_of(params: ParameterSet, model: Any) -> Any:
    """Returns the part of the model that compresses a profile, to the mean in vae and cvae."""
    import keras

    compressed = "latent" if params["model"] == "ae" else "z_mean"
    return keras.Model(model.input, model.get_layer(compressed).output, name="encoder")


def decoder_of(params: ParameterSet, model: Any) -> Any:
    """Returns a copy of the part that takes a compressed profile and, in cvae, the one-hot type."""
    import keras
    from keras import layers

    latent = layers.Input((params["latent_dim"],), name="compressed")
    types = [layers.Input(each.shape[1:], name="cancer_type") for each in model.inputs[1:]]
    decoded = _decoded(latent, types, params, model.output.shape[-1])
    decoder = keras.Model([latent, *types] if types else latent, decoded, name="decoder")
    of_both = [[layer for layer in each.layers if layer.weights] for each in (decoder, model)]
    for copy, original in zip(*(reversed(each) for each in of_both), strict=False):
        copy.set_weights(original.get_weights())
    return decoder


def build_autoencoder(params: ParameterSet, num_features: int, num_types: int) -> Any:
    """Returns the model; its input is the profile and, in cvae, the one-hot cancer type."""
    import keras
    from keras import layers

    profile = layers.Input((num_features,), name="profile")
    types = []
    if params["model"] == "cvae":
        types = [layers.Input((num_types,), name="cancer_type")]
    encoded = _dense_layers(_join(profile, types), params["dense"] or [], params)
    latent = _latent(encoded, params, num_features)
    decoded = _decoded(latent, types, params, num_features)
    return keras.Model([profile, *types] if types else profile, decoded, name="p1b1")


def _decoded(latent: Any, types: Sequence[Any], params: ParameterSet, num_features: int) -> Any:
    import keras

    from candle_p1.models.fast.layers import Dense

    units = list(reversed(params["dense"] or []))
    output = Dense(
        num_features,
        activation=params["out_activation"],
        kernel_initializer=initial_weights(params),
        dtype=keras.config.floatx(),  # the loss stays in float32 under mixed precision
    )
    return output(_dense_layers(_join(latent, types), units, params))


def _join(tensor: Any, types: Sequence[Any]) -> Any:
    from keras import layers

    return layers.Concatenate()([tensor, *types]) if types else tensor


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
