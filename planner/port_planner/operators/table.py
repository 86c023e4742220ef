"""The table: each known operator, by its base name, in exactly one row; operators with the same facts share a row."""

from collections.abc import Mapping

from port_planner.operators.row import (
    PRODUCT_ROWS,
    VECTOR,
    ArgumentCheck,
    Cost,
    CutDimension,
    Filling,
    Operator,
    Product,
    Reads,
    Result,
    TileRule,
)

_PLAIN = ("",)
"""The overload without a suffix."""
_ELEMENTS = TileRule(CutDimension.ELEMENTS)
_VECTORS = TileRule(CutDimension.ELEMENTS, multiple=VECTOR)
_ROOTS = TileRule(CutDimension.ELEMENTS, multiple=VECTOR, rounded=True)

_NOTES = "torch 2.13, use_deterministic_algorithms"
_ATTENTION = "pytorch#182551"
_APPLE, _APPLE_PATHS = "pytorch#195754", "pytorch#197506"

ROWS: Mapping[str, Operator] = {
    # Elementwise.
    "abs reciprocal": Operator(result=Result.BROADCAST, sliced=_PLAIN, in_place=True),
    "abs_ addcdiv_ addcmul_ clamp_ sign sign_": Operator(sliced=_PLAIN),
    "add mul": Operator(
        result=Result.BROADCAST, cut=_ELEMENTS, sliced=("Scalar", "Tensor"), in_place=True, commutes=("Tensor",)
    ),
    "add_ div_ mul_": Operator(cut=_ELEMENTS, sliced=("Scalar", "Tensor")),
    "addcdiv addcmul": Operator(result=Result.BROADCAST, sliced=_PLAIN),
    "clamp_max clamp_min masked_fill_ where": Operator(cut=_ELEMENTS),
    "cos minimum sin": Operator(result=Result.BROADCAST),
    "div": Operator(result=Result.BROADCAST, cut=_ELEMENTS, sliced=("Scalar", "Tensor"), in_place=True),
    "elu erf hardsigmoid hardswish threshold": Operator(in_place=True),
    "eq ge gt le lt ne": Operator(result=Result.COMPARISON, cut=_ELEMENTS),
    "exp gelu sigmoid silu tanh": Operator(result=Result.BROADCAST, cut=_VECTORS, in_vectors=_PLAIN, in_place=True),
    "exp_ gelu_": Operator(cut=_VECTORS),
    "gelu_backward": Operator(check=ArgumentCheck.GELU, result=Result.BROADCAST, cut=_VECTORS, in_vectors=_PLAIN),
    "hardtanh": Operator(cut=_ELEMENTS, in_vectors=_PLAIN, in_place=True),
    "hardtanh_ hardtanh_backward native_dropout_backward relu_": Operator(cut=_ELEMENTS, in_vectors=_PLAIN),
    "leaky_relu": Operator(in_vectors=_PLAIN, in_place=True),
    "leaky_relu_ leaky_relu_backward": Operator(in_vectors=_PLAIN),
    "lerp": Operator(result=Result.BROADCAST, sliced=("Scalar",)),
    "lerp_": Operator(sliced=("Scalar", "Tensor")),
    "log": Operator(result=Result.BROADCAST, in_place=True),
    "logical_not": Operator(result=Result.COMPARISON),
    "masked_fill": Operator(cut=_ELEMENTS, in_vectors=("Scalar",), in_place=True),
    "maximum": Operator(result=Result.BROADCAST, sliced=("out",)),
    "neg": Operator(result=Result.BROADCAST, cut=_ELEMENTS, sliced=_PLAIN, in_place=True),
    "neg_": Operator(cut=_ELEMENTS, sliced=_PLAIN),
    "pow": Operator(result=Result.BROADCAST, cut=_VECTORS, in_vectors=("Tensor_Scalar",)),
    "relu": Operator(result=Result.BROADCAST, cut=_ELEMENTS, in_vectors=_PLAIN, in_place=True),
    "rsqrt": Operator(result=Result.BROADCAST, cut=_ROOTS, in_vectors=_PLAIN, in_place=True),
    "rsqrt_": Operator(cut=_ROOTS),
    "rsub": Operator(result=Result.BROADCAST, cut=_ELEMENTS),
    "sigmoid_ silu_ tanh_": Operator(cut=_VECTORS, in_vectors=_PLAIN),
    "sigmoid_backward silu_backward tanh_backward": Operator(result=Result.BROADCAST, cut=_VECTORS, in_vectors=_PLAIN),
    "sqrt": Operator(result=Result.BROADCAST, cut=_ROOTS, sliced=_PLAIN, in_place=True),
    "sqrt_": Operator(cut=_ROOTS, sliced=_PLAIN),
    "sub": Operator(result=Result.BROADCAST, cut=_ELEMENTS, sliced=("Tensor",), in_place=True),
    "sub_": Operator(cut=_ELEMENTS, sliced=("Tensor",)),
    "threshold_backward": Operator(result=Result.BROADCAST, cut=_ELEMENTS, in_vectors=_PLAIN),
    # Operators that create tensors.
    "empty": Operator(result=Result.CREATED, fill=Filling.NOTHING),
    "_empty_affine_quantized _empty_per_channel_affine_quantized empty_permuted empty_quantized": Operator(
        allowed=False, fill=Filling.NOTHING
    ),
    "empty_like": Operator(reads=Reads.SHAPES, result=Result.LIKE, fill=Filling.NOTHING, cut=_ELEMENTS, sliced=_PLAIN),
    "empty_strided": Operator(fill=Filling.NOTHING),
    "full": Operator(fill=Filling.NUMBER, fill_number=1),
    "full_like": Operator(reads=Reads.SHAPES, result=Result.LIKE, fill=Filling.NUMBER, fill_number=1),
    "new_empty new_empty_strided": Operator(reads=Reads.SHAPES, fill=Filling.NOTHING),
    "new_full": Operator(reads=Reads.SHAPES, fill=Filling.NUMBER, fill_number=2),
    "new_ones": Operator(reads=Reads.SHAPES, fill=Filling.ONES),
    "new_zeros": Operator(reads=Reads.SHAPES, fill=Filling.ZEROS),
    "ones": Operator(result=Result.CREATED, fill=Filling.ONES),
    "ones_like": Operator(reads=Reads.SHAPES, result=Result.LIKE, fill=Filling.ONES, cut=_ELEMENTS),
    "rand randn": Operator(result=Result.CREATED, draws_by_shape=_PLAIN),
    "rand_like randn_like": Operator(reads=Reads.SHAPES, result=Result.LIKE, draws_by_shape=_PLAIN),
    "randint": Operator(result=Result.CREATED, draws_by_shape=("", "low")),
    "randint_like": Operator(reads=Reads.SHAPES, result=Result.LIKE, draws_by_shape=("", "low_dtype")),
    "tril triu": Operator(result=Result.LIKE),
    "zeros": Operator(result=Result.CREATED, fill=Filling.ZEROS),
    "zeros_like": Operator(reads=Reads.SHAPES, result=Result.LIKE, fill=Filling.ZEROS, cut=_ELEMENTS, sliced=_PLAIN),
    # Copies, views, and operators without a result.
    "alias detach": Operator(allowed=False, whole_view=True),
    "_assert_async _linalg_check_errors": Operator(checks_only=True),
    "clone": Operator(copies=True, result=Result.BROADCAST, cut=_ELEMENTS, sliced=_PLAIN),
    "copy_": Operator(copies=True, cut=_ELEMENTS, sliced=_PLAIN),
    "diagonal_backward select_backward slice_backward": Operator(result=Result.INTO_ZEROS),
    "sym_numel sym_size sym_stride": Operator(allowed=False, reads=Reads.SHAPES),
    "_to_copy": Operator(copies=True, cut=_ELEMENTS),
    # Products, convolutions, attention.
    "addmm": Operator(
        factors=(1, 2),
        weight=2,
        product=Product({1: "mk", 2: "kn"}, (("k", 1, 2),), addend=0),
        cost=Cost.PRODUCT,
        cut=TileRule(CutDimension.FIRST, least=PRODUCT_ROWS, cut=(1,)),
    ),
    "baddbmm": Operator(factors=(1, 2), cost=Cost.PRODUCT),
    "bmm": Operator(
        factors=(0, 1),
        product=Product({0: "bmk", 1: "bkn"}, (("k", 0, 1),)),
        cost=Cost.PRODUCT,
        cut=TileRule(CutDimension.FIRST, cut=(0, 1)),
    ),
    "convolution": Operator(
        product=Product({0: "nc", 1: "oc"}, (("c", 0, 1),), addend=2),
        cost=Cost.CONVOLUTION,
        cut=TileRule(CutDimension.FIRST, least=2, cut=(0,)),
    ),
    "convolution_backward": Operator(
        product=Product({0: "no", 1: "nc", 2: "oc"}, (("o", 0, 2), ("n", 0, 1))),
        cost=Cost.CONVOLUTION_BACKWARD,
        cut_of_sum=TileRule(CutDimension.FIRST, least=2, cut=(0, 1)),
    ),
    "linalg_lu_solve": Operator(pivots=1),
    "mm": Operator(
        factors=(0, 1),
        weight=1,
        product=Product({0: "mk", 1: "kn"}, (("k", 0, 1),)),
        cost=Cost.PRODUCT,
        cut=TileRule(CutDimension.FIRST, least=PRODUCT_ROWS, cut=(0,)),
        cut_of_sum=TileRule(CutDimension.FIRST, least=PRODUCT_ROWS, cut=(0, 1)),
    ),
    "_native_multi_head_attention _transformer_encoder_layer_fwd": Operator(
        allowed=False,
        casts_inside=True,
        instead="call torch.backends.mha.set_fastpath_enabled(False) at the script's beginning",
    ),
    (
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_flash_attention"
    ): Operator(cuda_only=True, check=ArgumentCheck.ATTENTION, cost=Cost.ATTENTION),
    "_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward": Operator(
        cuda_only=True, check=ArgumentCheck.PADDED_ATTENTION, cost=Cost.ATTENTION_BACKWARD, reordered_on_cuda=_ATTENTION
    ),
    "_scaled_dot_product_flash_attention_backward": Operator(
        cuda_only=True, check=ArgumentCheck.ATTENTION, cost=Cost.ATTENTION_BACKWARD, reordered_on_cuda=_ATTENTION
    ),
    "_scaled_dot_product_flash_attention_for_cpu": Operator(
        check=ArgumentCheck.ATTENTION, cost=Cost.ATTENTION, cut=TileRule(CutDimension.EVERY)
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Operator(
        check=ArgumentCheck.ATTENTION, cost=Cost.ATTENTION_BACKWARD, cut=TileRule(CutDimension.EVERY)
    ),
    "_trilinear": Operator(casts_inside=True),
    # Rows, norms, recurrent layers.
    "amax mean": Operator(cut=TileRule(CutDimension.ROWS, axis=1)),
    "batch_norm_update_stats": Operator(allowed=False, hidden_writes=(1, 2)),
    "_batch_norm_with_update _batch_norm_with_update_functional": Operator(allowed=False, other_tangents=True),
    "cudnn_batch_norm": Operator(cuda_only=True, check=ArgumentCheck.BATCH_NORM, hidden_writes=(3, 4)),
    "cudnn_batch_norm_backward": Operator(cuda_only=True, check=ArgumentCheck.CUDNN_BATCH_NORM_BACKWARD),
    "_log_softmax _softmax": Operator(
        result=Result.ROWS, cut=TileRule(CutDimension.ROWS, least=2, axis=1), row_operands=1
    ),
    "_log_softmax_backward_data _softmax_backward_data": Operator(
        check=ArgumentCheck.SAME_SHAPES,
        result=Result.ROWS,
        cut=TileRule(CutDimension.ROWS, least=2, axis=2),
        row_operands=2,
    ),
    "miopen_batch_norm": Operator(allowed=False, hidden_writes=(3, 4)),
    "mkldnn_rnn_layer mkldnn_rnn_layer_backward": Operator(check=ArgumentCheck.LSTM),
    "native_batch_norm": Operator(
        check=ArgumentCheck.BATCH_NORM, hidden_writes=(3, 4), result=Result.NORMALIZED, other_tangents=True
    ),
    "native_batch_norm_backward": Operator(check=ArgumentCheck.BATCH_NORM, result=Result.NORMALIZED),
    "_native_batch_norm_legit": Operator(allowed=False, hidden_writes=(3, 4), other_tangents=True),
    "native_group_norm prod": Operator(other_tangents=True),
    "native_layer_norm": Operator(
        result=Result.NORMALIZED, cut=TileRule(CutDimension.FIRST, cut=(0,)), other_tangents=True
    ),
    "native_layer_norm_backward": Operator(
        check=ArgumentCheck.LAYER_NORM_BACKWARD,
        result=Result.NORMALIZED,
        cut_of_sum=TileRule(CutDimension.FIRST, cut=(0, 1, 3, 4)),
    ),
    "_safe_softmax": Operator(result=Result.ROWS, cut=TileRule(CutDimension.ROWS, least=2, axis=1)),
    "sum": Operator(cut=TileRule(CutDimension.ROWS, axis=1), cut_of_sum=TileRule(CutDimension.FIRST, cut=(0,))),
    "_weight_norm_interface _weight_norm_interface_backward": Operator(check=ArgumentCheck.WEIGHT_NORM),
    # Images and signals.
    "_adaptive_avg_pool2d_backward": Operator(
        check=ArgumentCheck.ADAPTIVE_AVERAGE, shape_only=1, reordered_on_cuda=_NOTES
    ),
    "_adaptive_avg_pool3d_backward": Operator(check=ArgumentCheck.ADAPTIVE_AVERAGE, reordered_on_cuda=_NOTES),
    "adaptive_max_pool2d_backward max_pool3d_with_indices_backward": Operator(
        check=ArgumentCheck.MAX_POOL, reordered_on_cuda=_NOTES, reordered_on_mps=_APPLE_PATHS
    ),
    "adaptive_max_pool3d_backward fractional_max_pool2d_backward fractional_max_pool3d_backward": Operator(
        check=ArgumentCheck.MAX_POOL
    ),
    "avg_pool2d_backward": Operator(check=ArgumentCheck.AVERAGE_POOL, shape_only=1, reordered_on_mps=_APPLE_PATHS),
    "avg_pool3d_backward": Operator(
        check=ArgumentCheck.AVERAGE_POOL, reordered_on_cuda=_NOTES, reordered_on_mps=_APPLE_PATHS
    ),
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams _fused_moving_avg_obs_fq_helper": Operator(
        check=ArgumentCheck.FAKE_QUANTIZE
    ),
    "_fft_c2c _fft_c2r _fft_r2c": Operator(check=ArgumentCheck.FOURIER),
    "grid_sampler_2d": Operator(check=ArgumentCheck.GRID_SAMPLER, coordinates=1),
    "grid_sampler_2d_backward": Operator(
        check=ArgumentCheck.GRID_SAMPLER, coordinates=2, reordered_on_cuda=_NOTES, reordered_on_mps=_APPLE_PATHS
    ),
    "grid_sampler_3d grid_sampler_3d_backward": Operator(check=ArgumentCheck.GRID_SAMPLER),
    "max_pool2d_with_indices_backward": Operator(
        check=ArgumentCheck.MAX_POOL, shape_only=1, reordered_on_mps=_APPLE_PATHS
    ),
    (
        "reflection_pad1d_backward reflection_pad2d_backward replication_pad1d_backward replication_pad2d_backward"
    ): Operator(check=ArgumentCheck.PADDING, reordered_on_cuda=_NOTES),
    "reflection_pad3d_backward replication_pad3d_backward": Operator(check=ArgumentCheck.PADDING),
    "unfold_backward": Operator(check=ArgumentCheck.UNFOLD),
    (
        "upsample_bicubic2d _upsample_bicubic2d_aa upsample_bilinear2d _upsample_bilinear2d_aa "
        "_upsample_bilinear2d_aa_backward upsample_linear1d upsample_nearest1d upsample_nearest2d "
        "upsample_nearest3d upsample_nearest3d_backward _upsample_nearest_exact1d "
        "_upsample_nearest_exact1d_backward _upsample_nearest_exact2d _upsample_nearest_exact2d_backward "
        "_upsample_nearest_exact3d _upsample_nearest_exact3d_backward upsample_trilinear3d "
        "upsample_trilinear3d_backward"
    ): Operator(check=ArgumentCheck.UPSAMPLE),
    "_upsample_bicubic2d_aa_backward": Operator(allowed=False, check=ArgumentCheck.UPSAMPLE),
    "upsample_bicubic2d_backward upsample_bilinear2d_backward upsample_linear1d_backward": Operator(
        check=ArgumentCheck.UPSAMPLE, reordered_on_cuda=_NOTES, reordered_on_mps=_APPLE_PATHS
    ),
    "upsample_nearest1d_backward upsample_nearest2d_backward": Operator(
        check=ArgumentCheck.UPSAMPLE, reordered_on_mps=_APPLE_PATHS
    ),
    # Losses, distances, rows selected by indices.
    "_cdist_backward": Operator(check=ArgumentCheck.DISTANCES),
    "cumsum histc index_copy index_copy_ median nll_loss2d_forward": Operator(reordered_on_cuda=_NOTES),
    "_ctc_loss": Operator(lengths=0),
    "_ctc_loss_backward": Operator(check=ArgumentCheck.CTC_LOSS, lengths=1, reordered_on_cuda=_NOTES),
    "embedding": Operator(reads=Reads.ROWS, indices=(0, 1), weight=0),
    "_embedding_bag": Operator(check=ArgumentCheck.EMBEDDING_BAG),
    "_embedding_bag_backward _embedding_bag_per_sample_weights_backward": Operator(
        check=ArgumentCheck.EMBEDDING_BAG_BACKWARD
    ),
    "embedding_dense_backward": Operator(
        check=ArgumentCheck.EMBEDDING, indices=(2, 1), reordered_on_mps="pytorch#195404"
    ),
    "gather": Operator(indices=(0, 2)),
    "index": Operator(index_list=True),
    "index_add index_add_ index_select_backward scatter_add scatter_add_": Operator(
        reordered_on_cuda=_NOTES, reordered_on_mps=_APPLE
    ),
    "index_put index_put_": Operator(index_list=True, reordered_on_cuda=_NOTES, reordered_on_mps="pytorch#97574"),
    "index_select": Operator(reads=Reads.ROWS, indices=(0, 2)),
    "_local_scalar_dense": Operator(allowed=False, reads=Reads.ROWS),
    "multi_margin_loss_backward multilabel_margin_loss_backward": Operator(check=ArgumentCheck.MARGIN_LOSS),
    "nll_loss2d_backward": Operator(check=ArgumentCheck.NLL_LOSS, shape_only=1),
    "nll_loss_backward": Operator(
        check=ArgumentCheck.NLL_LOSS, shape_only=1, indices=(1, 2), cut=TileRule(CutDimension.FIRST, cut=(1, 2))
    ),
    "nll_loss_forward": Operator(indices=(0, 1)),
    "_pdist_backward": Operator(check=ArgumentCheck.DISTANCES_OF_PAIRS),
    "_pdist_forward": Operator(check=ArgumentCheck.PAIRS),
    "poisson_nll_loss": Operator(allowed=False, repeatable=False),
    "scatter scatter_": Operator(reordered_on_cuda=_NOTES, reordered_on_mps="pytorch#97574"),
    "scatter_reduce": Operator(reordered_on_cuda=_NOTES, reordered_on_mps=_APPLE_PATHS),
    # Updates over lists.
    "_foreach_add_": Operator(in_vectors=("List", "Scalar", "ScalarList")),
    "_foreach_addcdiv_ _foreach_addcmul_": Operator(allowed=False, in_vectors=("Scalar", "ScalarList")),
    "_foreach_div_": Operator(allowed=False, in_vectors=("List", "Scalar", "ScalarList")),
    "_foreach_lerp_": Operator(in_vectors=("List", "Scalar")),
    "_foreach_mul_": Operator(allowed=False, in_vectors=("List", "Scalar", "ScalarList", "Tensor")),
    "_foreach_neg_ _foreach_sqrt_": Operator(allowed=False, in_vectors=_PLAIN),
    "_foreach_sub_": Operator(allowed=False, in_vectors=("List",)),
    "_fused_adagrad _fused_adam _fused_adamw _fused_sgd": Operator(allowed=False, over_lists=True),
    "_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_": Operator(
        check=ArgumentCheck.FUSED_UPDATE, fused_update=True
    ),
    # Operators that draw random numbers.
    "bernoulli": Operator(draws_by_shape=("", "p")),
    "bernoulli_": Operator(draws_by_shape=("Tensor", "float")),
    "exponential_ native_dropout normal_ uniform_": Operator(draws_by_shape=_PLAIN),
    "random_": Operator(draws_by_shape=("", "from", "to")),
    "rrelu_with_noise_backward": Operator(repeatable=False),
    # The only fact beyond torch's schema and tags is that a bundle may call these.
    (
        "acos acosh affine_grid_generator adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d "
        "adaptive_max_pool2d adaptive_max_pool3d addbmm addmv addr alias_copy all amin aminmax angle any arange argmax "
        "argmin argsort as_strided_scatter asin asinh atan atan2 atanh avg_pool1d avg_pool2d avg_pool3d "
        "binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits binomial bitwise_and "
        "bitwise_and_ bitwise_not bitwise_or bitwise_xor block_diag bucketize cat cauchy_ _cdist_forward ceil ceil_ "
        "celu channel_shuffle cholesky_inverse cholesky_solve clamp clamp_max_ clamp_min_ col2im complex "
        "_conj_physical conj_physical constant_pad_nd copy copysign cosh count_nonzero cummax cummin cumprod deg2rad "
        "detach_copy diag_embed diagonal_copy diagonal_scatter digamma digamma_ _dirichlet_grad dist dot "
        "embedding_renorm_ elu_ elu_backward eq_ erf_ erfc erfinv exp2 expand_copy expm1 eye "
        "fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask fill fill_ flip floor "
        "floor_ floor_divide fmax fmin fmod fmod_ frac fractional_max_pool2d fractional_max_pool3d frexp "
        "_fused_rms_norm _fused_rms_norm_backward geometric_ glu glu_backward _grouped_mm hamming_window hann_window "
        "hardshrink hardshrink_backward hardsigmoid_ hardsigmoid_backward hardswish_ hardswish_backward huber_loss "
        "huber_loss_backward hypot i0 im2col index_fill index_fill_ index_reduce _is_all_true _is_any_true isclose "
        "isfinite isinf isnan isneginf isposinf kthvalue ldexp lgamma linalg_cholesky_ex linalg_cross _linalg_det "
        "linalg_eig _linalg_eigh linalg_householder_product linalg_inv_ex linalg_lu linalg_lu_factor_ex "
        "linalg_matrix_exp linalg_pinv linalg_qr _linalg_slogdet _linalg_solve_ex linalg_solve_triangular _linalg_svd "
        "linalg_vector_norm linspace log_ log10 log1p log2 log_normal_ log_sigmoid_backward log_sigmoid_forward "
        "logaddexp logaddexp2 logcumsumexp logical_and logical_and_ logical_not_ logical_or logical_or_ logical_xor "
        "logit logit_backward logsumexp masked_scatter masked_scatter_ masked_scatter_backward masked_select max "
        "max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d min mish mish_ mish_backward mode "
        "mse_loss mse_loss_backward multi_margin_loss multilabel_margin_loss_forward multinomial mv mvlgamma "
        "nan_to_num nanmedian nansum narrow_copy native_group_norm_backward nextafter nonzero norm normal one_hot "
        "ormqr permute_copy pixel_shuffle pixel_unshuffle poisson polar polygamma pow_ _prelu_kernel "
        "_prelu_kernel_backward put rad2deg randperm reciprocal_ reflection_pad1d reflection_pad2d reflection_pad3d "
        "remainder remainder_ renorm renorm_ repeat repeat_interleave replication_pad1d replication_pad2d "
        "replication_pad3d roll rot90 round rrelu_with_noise _sample_dirichlet scalar_tensor searchsorted select_copy "
        "select_scatter sgn sinc sinh slice_copy slice_scatter smooth_l1_loss smooth_l1_loss_backward soft_margin_loss "
        "soft_margin_loss_backward softplus softplus_backward softshrink softshrink_backward sort special_entr "
        "special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_ndtri special_xlog1py split_copy "
        "split_with_sizes_copy square squeeze_copy stack _standard_gamma _standard_gamma_grad std std_mean t_copy take "
        "tan threshold_ topk trace transpose_copy triangular_solve tril_ triu_ trunc unbind_copy unfold_copy _unique2 "
        "unsqueeze_copy var var_mean vdot view_copy xlogy zero_"
    ): Operator(),
}
"""Base names, separated by blanks, and the facts about these operators."""

OPERATORS: Mapping[str, Operator] = {name: row for names, row in ROWS.items() for name in names.split()}
"""Rows of operators, by base name."""
