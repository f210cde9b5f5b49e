//! A mixture of experts that are spread over ranks gives the bits of one process, and the gradients of plain arithmetic.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{Linear, func};
use collectives::Communicator;
use collectives_candle::{ExpertParallel, cause, run_local};
use training_common::uniform;

const WIDTH: usize = 6;
const EXPERTS: usize = 5;

fn tensor(seed: u64, shape: &[usize]) -> Tensor {
    Tensor::from_vec(uniform(seed, 1.0, shape.iter().product()), shape, &Device::Cpu).unwrap()
}

fn weight(expert: usize) -> Tensor {
    tensor(100 + expert as u64, &[WIDTH, WIDTH])
}

/// The tokens of all ranks, with the experts that they have chosen and the weights of these choices.
struct Case {
    name: &'static str,
    tokens: Tensor,
    ids: Vec<Vec<u32>>,
    weights: Tensor,
}

impl Case {
    fn new(name: &'static str, choices: usize, ids: Vec<u32>) -> Self {
        let count = ids.len() / choices;
        let ids = ids.chunks(choices).map(<[u32]>::to_vec).collect();
        Self { name, tokens: tensor(1, &[count, WIDTH]), ids, weights: tensor(2, &[count, choices]) }
    }

    fn choices(&self) -> usize {
        self.weights.dim(1).unwrap()
    }

    /// A rank's tokens, ids and weights, if rank `n` has `counts[n]` tokens.
    fn part(&self, counts: &[usize], rank: usize) -> Result<(Tensor, Tensor, Tensor)> {
        let (from, count) = (counts[..rank].iter().sum(), counts[rank]);
        let ids: Vec<u32> = self.ids[from..from + count].concat();
        Ok((
            self.tokens.narrow(0, from, count)?,
            Tensor::from_vec(ids, (count, self.choices()), &Device::Cpu)?,
            self.weights.narrow(0, from, count)?,
        ))
    }
}

fn cases() -> Vec<Case> {
    let scattered = |choices: u32, tokens: u32| (0..tokens * choices).map(|index| (index * 7 + index / 3) % EXPERTS as u32).collect();
    vec![
        Case::new("two choices", 2, scattered(2, 13)),
        Case::new("three choices", 3, scattered(3, 9)),
        Case::new("only the last expert", 1, vec![EXPERTS as u32 - 1; 7]),
        Case::new("two experts without tokens", 2, (0..8).flat_map(|token| [1, 2 + token % 2 * 2]).collect()),
        Case::new("the same expert twice", 2, vec![3, 3, 0, 0, 3, 0]),
    ]
}

/// Ways to divide tokens between ranks: equally, all to one rank, and uneven with an empty rank.
fn divisions(tokens: usize, ranks: usize) -> Vec<Vec<usize>> {
    let equal = (0..ranks).map(|rank| (rank + 1) * tokens / ranks - rank * tokens / ranks).collect();
    let one = |owner: usize| (0..ranks).map(|rank| if rank == owner { tokens } else { 0 }).collect();
    let mut uneven = vec![0; ranks];
    uneven[0] = 1;
    uneven[ranks - 1] += tokens - 1;
    vec![equal, one(0), one(ranks - 1), uneven]
}

/// The numbers of a rank's experts, in blocks of unequal lengths; the second of four ranks has none.
fn held(ranks: usize, rank: usize) -> std::ops::Range<usize> {
    let bounds: &[usize] = match ranks {
        1 => &[0, 5],
        2 => &[0, 2, 5],
        3 => &[0, 1, 2, 5],
        _ => &[0, 2, 2, 4, 5],
    };
    bounds[rank]..bounds[rank + 1]
}

fn layer(comm: &Communicator) -> Result<ExpertParallel<Linear>> {
    let own = held(comm.world_size(), comm.rank());
    ExpertParallel::new(comm, own.map(|expert| Linear::new(weight(expert), None)).collect())
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// Computes the results of all tokens in plain loops. Only the products of a matrix come from candle.
fn expected(case: &Case, capacity: usize) -> Vec<u32> {
    let weights = case.weights.to_vec2::<f32>().unwrap();
    let mut results = vec![vec![None; case.choices()]; case.ids.len()];
    for expert in 0..EXPERTS {
        let mut taken = Vec::new();
        for (token, ids) in case.ids.iter().enumerate() {
            for (choice, id) in ids.iter().enumerate() {
                if *id as usize == expert && taken.len() < capacity {
                    taken.push((token, choice));
                }
            }
        }
        if taken.is_empty() {
            continue;
        }
        let rows: Vec<Tensor> = taken.iter().map(|(token, _)| case.tokens.get(*token).unwrap()).collect();
        let outputs = Linear::new(weight(expert), None).forward(&Tensor::stack(&rows, 0).unwrap()).unwrap();
        for ((token, choice), output) in taken.into_iter().zip(outputs.to_vec2::<f32>().unwrap()) {
            results[token][choice] = Some(output);
        }
    }
    let sum = |token: usize, column: usize| {
        let term = |choice: usize| weights[token][choice] * results[token][choice].as_ref().map_or(0.0, |output: &Vec<f32>| output[column]);
        (1..case.choices()).fold(term(0), |sum, choice| sum + term(choice))
    };
    (0..case.ids.len()).flat_map(|token| (0..WIDTH).map(move |column| (token, column))).map(|(t, c)| sum(t, c).to_bits()).collect()
}

#[test]
fn every_division_of_tokens_and_experts_gives_the_bits_of_one_process() {
    for case in cases() {
        for capacity in [None, Some(0), Some(1), Some(3), Some(1000)] {
            let expected = expected(&case, capacity.unwrap_or(usize::MAX));
            for ranks in 1..=4 {
                for counts in divisions(case.ids.len(), ranks) {
                    let found = run_local(ranks, |comm| {
                        let mut layer = layer(comm)?;
                        assert_eq!(layer.experts().len(), held(ranks, comm.rank()).len());
                        if let Some(capacity) = capacity {
                            layer = layer.capacity(capacity);
                        }
                        let (tokens, ids, weights) = case.part(&counts, comm.rank())?;
                        let first = layer.forward(&tokens, &ids, &weights)?;
                        assert_eq!(bits(&first), bits(&layer.forward(&tokens, &ids, &weights)?), "a second run");
                        assert_eq!(first.dims(), tokens.dims());
                        Ok(bits(&first))
                    });
                    assert_eq!(found.unwrap().concat(), expected, "{}, capacity {capacity:?}, {counts:?}", case.name);
                }
            }
        }
    }
}

/// The gradients of tokens, weights and the matrices of the experts, computed by every expert for every token.
fn expected_gradients(case: &Case) -> Vec<Vec<f32>> {
    let (tokens, weights) = (Var::from_tensor(&case.tokens).unwrap(), Var::from_tensor(&case.weights).unwrap());
    let matrices: Vec<Var> = (0..EXPERTS).map(|expert| Var::from_tensor(&weight(expert)).unwrap()).collect();
    let mut output = case.tokens.zeros_like().unwrap();
    for (expert, matrix) in matrices.iter().enumerate() {
        let mask: Vec<f32> = case.ids.iter().flatten().map(|id| f32::from(u8::from(*id as usize == expert))).collect();
        let mask = Tensor::from_vec(mask, case.weights.dims(), &Device::Cpu).unwrap();
        let share = (weights.as_tensor() * mask).unwrap().sum_keepdim(1).unwrap();
        let all = Linear::new(matrix.as_tensor().clone(), None).forward(&tokens).unwrap();
        output = (output + all.broadcast_mul(&share).unwrap()).unwrap();
    }
    let gradients = output.sqr().unwrap().sum_all().unwrap().backward().unwrap();
    let of = |var: &Var| gradients.get(var).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    [&tokens, &weights].into_iter().chain(&matrices).map(of).collect()
}

#[test]
fn gradients_are_those_of_experts_that_see_every_token() {
    for case in cases() {
        let expected = expected_gradients(&case);
        for ranks in 1..=4 {
            for counts in divisions(case.ids.len(), ranks) {
                let found = run_local(ranks, |comm| {
                    let own = held(ranks, comm.rank());
                    let matrices: Vec<Var> = own.map(|expert| Var::from_tensor(&weight(expert))).collect::<Result<_>>()?;
                    let experts = matrices.iter().map(|matrix| Linear::new(matrix.as_tensor().clone(), None)).collect();
                    let (tokens, ids, weights) = case.part(&counts, comm.rank())?;
                    let (tokens, weights) = (Var::from_tensor(&tokens)?, Var::from_tensor(&weights)?);
                    let output = ExpertParallel::new(comm, experts)?.forward(&tokens, &ids, &weights)?;
                    let gradients = output.sqr()?.sum_all()?.backward()?;
                    let of = |var: &Var| match gradients.get(var) {
                        Some(gradient) => gradient.flatten_all()?.to_vec1::<f32>(),
                        None => Ok(vec![0.0; var.elem_count()]), // of an expert without tokens
                    };
                    let matrices = matrices.iter().map(of).collect::<Result<Vec<_>>>()?;
                    Ok((of(&tokens)?, of(&weights)?, matrices))
                });
                let (mut tokens, mut weights, mut matrices) = (Vec::new(), Vec::new(), Vec::new());
                for (of_tokens, of_weights, of_matrices) in found.unwrap() {
                    tokens.extend(of_tokens);
                    weights.extend(of_weights);
                    matrices.extend(of_matrices);
                }
                for (found, expected) in [tokens, weights].iter().chain(&matrices).zip(&expected) {
                    assert_eq!(found.len(), expected.len(), "{}, {counts:?}", case.name);
                    let largest = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    // Sums of some dozen products of numbers of about 10.
                    assert!(largest <= 1e-3, "{}, {counts:?}: {largest}", case.name);
                }
            }
        }
    }
}

#[test]
fn backward_passes_agree_even_if_experts_track_nothing_or_tokens_are_not_tracked() {
    let case = Case::new("only the first expert", 1, vec![0; 4]);
    for tracked in [false, true] {
        let found = run_local(2, |comm| {
            // Rank 1 gets no token. Rank 0's expert has a variable, but forgets where its result came from.
            let factor = Var::new(2.0_f32, &Device::Cpu)?;
            let own = factor.as_tensor().clone();
            let expert = func(move |x| if tracked { x.broadcast_mul(&own).map(|x| x.detach()) } else { x.broadcast_mul(&own) });
            let (tokens, ids, weights) = case.part(&[2, 2], comm.rank())?;
            let (tokens, weights) = (Var::from_tensor(&tokens)?, Var::from_tensor(&weights)?);
            let input = if tracked { tokens.as_tensor().clone() } else { tokens.as_detached_tensor() };
            let output = ExpertParallel::new(comm, vec![expert])?.forward(&input, &ids, &weights)?;
            let gradients = output.sum_all()?.backward()?;
            assert!(gradients.get(&weights).is_some() && gradients.get(&factor).is_none());
            comm.barrier().map_err(std::io::Error::other)?; // no rank is left in another call
            gradients.get(&tokens).map(|gradient| gradient.flatten_all()?.to_vec1::<f32>()).transpose()
        });
        let none = tracked.then(|| vec![0.0; 2 * WIDTH]);
        assert_eq!(found.unwrap(), [none.clone(), none]);
    }
}

#[test]
fn every_rank_gets_an_error_if_one_rank_passes_wrong_arguments() {
    type Change = fn(Tensor, Tensor, Tensor) -> Result<(Tensor, Tensor, Tensor)>;
    let changes: [(&str, Change); 9] = [
        ("token 1 (from 0) has chosen expert 5", |x, ids, w| Ok((x, (ids + 3.0)?, w))),
        ("chosen expert -1", |x, ids, w| Ok((x, (ids.to_dtype(DType::I64)? - 1.0)?, w))),
        ("must be integers", |x, ids, w| Ok((x, ids.to_dtype(DType::F32)?, w))),
        ("with at least one choice", |x, ids, w| Ok((x, ids.narrow(1, 0, 0)?, w))),
        ("4 tokens need ids", |x, ids, w| Ok((x, ids.narrow(0, 0, 3)?, w))),
        ("the weights are", |x, ids, w| Ok((x, ids, w.t()?))),
        ("the weights are", |x, ids, w| Ok((x, ids, w.to_dtype(DType::F64)?))),
        ("expected: 2, got: 1", |x, ids, w| Ok((x.flatten_all()?, ids, w))),
        ("width 3", |x, ids, w| Ok((x.narrow(1, 0, 3)?, ids, w))),
    ];
    for (text, change) in changes {
        for bad in 0..2 {
            let errors = run_local(2, |comm| {
                let case = Case::new("", 2, vec![0, 1, 2, 0, 1, 1, 2, 2].into_iter().chain([0; 8]).collect());
                let (tokens, ids, weights) = case.part(&[4, 4], 0)?;
                let layer = layer(comm)?;
                let (tokens, ids, weights) = if comm.rank() == bad { change(tokens, ids, weights)? } else { (tokens, ids, weights) };
                let error = layer.forward(&tokens, &ids, &weights).unwrap_err().to_string();
                comm.barrier().map_err(std::io::Error::other)?; // the communicator stays usable
                Ok(error)
            });
            let errors = errors.unwrap();
            assert!(errors[bad].contains(text), "{}", errors[bad]);
            let other = &errors[1 - bad];
            assert!(other.contains(&format!("rank {bad}")) || other.contains(text), "{other}");
        }
    }
}

#[test]
fn differences_between_ranks_are_named() {
    let case = Case::new("", 1, vec![0; 4]);
    let errors = run_local(2, |comm| {
        let (tokens, ids, weights) = case.part(&[2, 2], comm.rank())?;
        let layer = layer(comm)?;
        let is_other = comm.rank() == 1;
        let untracked =
            layer.forward(&if is_other { Var::from_tensor(&tokens)?.as_tensor().clone() } else { tokens.clone() }, &ids, &weights);
        let own = if is_other { layer.clone().capacity(3) } else { layer.clone() };
        let wide = if is_other { DType::F64 } else { DType::F32 };
        Ok([
            untracked.unwrap_err().to_string(),
            own.forward(&tokens, &ids, &weights).unwrap_err().to_string(),
            layer.forward(&tokens.to_dtype(wide)?, &ids, &weights.to_dtype(wide)?).unwrap_err().to_string(),
        ])
    });
    for errors in errors.unwrap() {
        for (error, text) in errors.iter().zip(["but rank 1 passed tokens of type f32 and width 6, tracked", "a capacity of 3", "type f64"])
        {
            assert!(error.contains(text), "{error}");
        }
    }
}

#[test]
fn an_expert_that_fails_or_panics_or_a_lost_rank_is_an_error() {
    let error = run_local(2, |comm| {
        let number = comm.rank();
        let expert = func(move |x| if number == 1 { x.narrow(1, 0, 2) } else { Ok(x.clone()) });
        let (ids, weights) = (Tensor::new(&[[1_u32]], &Device::Cpu)?, Tensor::new(&[[1.0_f32]], &Device::Cpu)?);
        ExpertParallel::new(comm, vec![expert])?.forward(&tensor(1, &[1, WIDTH]), &ids, &weights)
    });
    assert!(error.unwrap_err().to_string().contains("expert 0 of this rank returned F32 [2, 2] for F32 [2, 6]"));
    // A panic of an expert, or a rank that leaves, does not leave the other ranks waiting.
    let error = run_local(2, |comm| {
        let number = comm.rank();
        let expert = func(move |x| if number == 1 { panic!("on purpose") } else { Ok(x.clone()) });
        let (ids, weights) = (Tensor::new(&[[1_u32]], &Device::Cpu)?, Tensor::new(&[[1.0_f32]], &Device::Cpu)?);
        ExpertParallel::new(comm, vec![expert])?.forward(&tensor(1, &[1, WIDTH]), &ids, &weights)
    });
    assert!(error.unwrap_err().to_string().contains("rank 1"));
    let errors = run_local(2, |comm| {
        let layer = layer(comm)?;
        let (ids, weights) = (Tensor::new(&[[1_u32]], &Device::Cpu)?, Tensor::new(&[[1.0_f32]], &Device::Cpu)?);
        Ok((comm.rank() == 0).then(|| layer.forward(&tensor(1, &[1, WIDTH]), &ids, &weights)).and_then(Result::err))
    });
    assert!(cause(errors.unwrap()[0].as_ref().unwrap()).unwrap().is_peer_lost());
    let error = run_local(2, |comm| ExpertParallel::<Linear>::new(comm, Vec::new()).map(drop)).unwrap_err();
    assert!(error.to_string().contains("no rank has an expert") && cause(&error).is_none());
}

#[test]
fn impossible_numbers_of_a_peer_are_errors() {
    let errors = run_local(2, |comm| {
        let raw = |numbers: &[u64]| comm.all_gather_into(numbers, &mut vec![0; 2 * numbers.len()]).map_err(std::io::Error::other);
        let mut errors = Vec::new();
        for experts in [u64::MAX, 1 << 20] {
            if comm.rank() == 1 {
                raw(&[experts])?;
            } else {
                errors.push(ExpertParallel::new(comm, vec![Linear::new(weight(0), None)]).map(drop).unwrap_err().to_string());
            }
        }
        if comm.rank() == 1 {
            raw(&[0])?;
            // Right arguments, type f32, width 6, not tracked, no capacity, and a number of choices of the only expert.
            [u64::MAX, u64::MAX / 16].iter().try_for_each(|count| raw(&[1, 7, WIDTH as u64, 0, 0, *count]))?;
            return Ok(errors);
        }
        let layer = ExpertParallel::new(comm, vec![Linear::new(weight(0), None)])?;
        let (tokens, ids, weights) = Case::new("", 1, vec![0]).part(&[1], 0)?;
        errors.extend([(); 2].map(|()| layer.forward(&tokens, &ids, &weights).unwrap_err().to_string()));
        Ok(errors)
    });
    let errors = errors.unwrap().swap_remove(0);
    let expected = ["at most 1048576", "at most 1048576", "larger than the address space", "larger than the address space"];
    assert!(errors.len() == 4 && errors.iter().zip(expected).all(|(error, text)| error.contains(text)), "{errors:?}");
}

#[test]
fn other_types_and_sizes_pass() {
    for dtype in [DType::F64, DType::F16, DType::BF16] {
        let found = run_local(3, |comm| {
            let expert = func(|x: &Tensor| x.affine(2.0, 0.0));
            let layer = ExpertParallel::new(comm, vec![expert])?;
            let tokens = Tensor::new(&[[1.0_f32, 2.0], [3.0, 4.0]], &Device::Cpu)?.t()?.to_dtype(dtype)?; // not contiguous
            let weights = Tensor::ones((2, 1), dtype, &Device::Cpu)?;
            let ids = Tensor::new(&[[2_u8], [0]], &Device::Cpu)?;
            let none = layer.forward(&tokens.narrow(1, 0, 0)?, &ids, &weights)?;
            assert_eq!(none.dims(), [2, 0]);
            layer.forward(&tokens, &ids, &weights)?.to_dtype(DType::F32)?.to_vec2::<f32>()
        });
        assert_eq!(found.unwrap(), vec![vec![vec![2.0, 6.0], vec![4.0, 8.0]]; 3]);
    }
    // No rank has a token.
    run_local(2, |comm| {
        let (tokens, ids, weights) = Case::new("", 2, Vec::new()).part(&[0, 0], comm.rank())?;
        assert_eq!(layer(comm)?.forward(&tokens, &ids, &weights)?.dims(), [0, WIDTH]);
        Ok(())
    })
    .unwrap();
}
