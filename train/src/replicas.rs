//! Checks that the ranks' copies of a model still have the same parameters.

use sha2::{Digest as _, Sha256};

use super::bytes::bytes_of;
use super::comparison::{Digest, difference, gather, hexadecimal};
use collectives::interop::Memory;
use collectives::{Buffer, Communicator, DType, Data, Error, Result};

const CALL: &str = "check_replicas";
const ADVICE: &str = "make the parameters equal again: load all ranks from one checkpoint, or broadcast the parameters of one rank";

/// A parameter, as it is compared.
struct Replica {
    /// The parameter in words, with its type and length.
    what: String,
    digest: Digest,
}

/// Checks that all ranks have the same parameters, bit for bit. Pass the name and the values of each parameter, in the
/// same order on every rank. Collective.
///
/// In data-parallel training, all ranks keep equal copies of the model. If the copies drift apart, training goes on
/// with wrong gradients and reports no error. Call this function every few hundred steps, and after you load a
/// checkpoint:
///
/// ```
/// use collectives::Communicator;
/// use collectives_train::check_replicas;
///
/// let errors = Communicator::run_local(3, |comm| {
///     let (weight, mut bias) = (vec![0.5_f32; 6], vec![0.0_f32; 2]);
///     check_replicas(comm, [("weight", &weight), ("bias", &bias)])?;
///     if comm.rank() == 2 {
///         bias[1] = 1e-9; // a bug, or a defect of the hardware
///     }
///     Ok(check_replicas(comm, [("weight", &weight), ("bias", &bias)]).unwrap_err().to_string())
/// })?;
/// assert!(errors[0].contains("parameter 1 \"bias\" (f32[2])") && errors[0].contains("these differ from rank 0: 2;"));
/// # Ok::<(), collectives::Error>(())
/// ```
///
/// If the parameters have several element types, call this function once for each type.
///
/// Cost: the SHA-256 of all values, and one all-gather of 40 B per rank. If the parameters differ, there is one more
/// all-gather of 32 B per rank and parameter, and then one of 256 B per rank.
///
/// # Errors
///
/// - `Mismatch` on every rank if parameters differ in values, name, type, length or number. The error names the first
///   parameter that differs, and the ranks that differ from most ranks. The communicator stays usable.
/// - `Unsupported` if a parameter is in device memory: copy it to the host first. The other ranks get a `Mismatch`.
/// - The errors of [`Communicator::all_gather_into`].
pub fn check_replicas<N: AsRef<str>, B: Buffer>(comm: &Communicator, parameters: impl IntoIterator<Item = (N, B)>) -> Result<()> {
    let named = parameters.into_iter().enumerate();
    let mine = named.map(|(index, (name, values))| Replica::of(index, name.as_ref(), &values)).collect::<Result<Vec<_>>>();
    let all = gather(comm, summary(&mine))?;
    if all.iter().all(|summary| *summary == all[0]) {
        return mine.map(drop);
    }
    let error = match &mine {
        Ok(replicas) if all.iter().all(|summary| summary[32..] == all[0][32..]) => first_difference(comm, replicas),
        Ok(replicas) => difference(comm, &all, &format!("{CALL} with {} parameters", replicas.len()), ADVICE),
        Err(_) => difference(comm, &all, &format!("{CALL} with a parameter in device memory"), ADVICE),
    };
    // This rank's own error is more useful than the difference.
    mine.and(Err(error))
}

impl Replica {
    fn of<B: Buffer>(index: usize, name: &str, values: &B) -> Result<Self> {
        let Memory::Host(memory) = values.memory() else {
            let what = format!("{CALL} of parameter {index} {name:?} in device memory");
            return Err(Error::unsupported(what, "copy the values to the host first"));
        };
        let (values, dtype) = (memory.as_slice(), <B::Element as Data>::DTYPE.map_or("plain data", DType::name));
        let what = format!("parameter {index} {name:?} ({dtype}[{}])", values.len());
        let digest = Sha256::new().chain_update((what.len() as u64).to_le_bytes()).chain_update(&what).chain_update(bytes_of(values));
        Ok(Self { what, digest: digest.finalize().into() })
    }
}

/// Returns a digest of all parameters, and their number. If a parameter cannot be compared, the number is one that no
/// model has.
fn summary(mine: &Result<Vec<Replica>>) -> [u8; 40] {
    let mut plain = [0; 40];
    let count = match mine {
        Ok(replicas) => {
            let digest = replicas.iter().fold(Sha256::new(), |digest, replica| digest.chain_update(replica.digest));
            plain[..32].copy_from_slice(&digest.finalize());
            replicas.len() as u64
        }
        Err(_) => u64::MAX,
    };
    plain[32..].copy_from_slice(&count.to_le_bytes());
    plain
}

/// Returns the error for the first parameter that differs. All ranks have the same number of parameters. Collective.
fn first_difference(comm: &Communicator, replicas: &[Replica]) -> Error {
    let mine: Vec<Digest> = replicas.iter().map(|replica| replica.digest).collect();
    let mut all = vec![[0; 32]; mine.len() * comm.world_size()];
    if let Err(error) = comm.all_gather_into(&mine, &mut all) {
        return error;
    }
    let of_all = |index: usize| -> Vec<Digest> { all.iter().skip(index).step_by(mine.len()).copied().collect() };
    let differs = |digests: &Vec<Digest>| digests.iter().any(|digest| *digest != digests[0]);
    let Some((index, digests)) = (0..mine.len()).map(of_all).enumerate().find(|(_, digests)| differs(digests)) else {
        return Error::argument(CALL, "the ranks' digests of the whole model differ, but their digests of each parameter are equal");
    };
    let Replica { what, digest } = &replicas[index];
    difference(comm, &digests, &format!("{CALL} with {what}, SHA-256 {}…", hexadecimal(&digest[..8])), ADVICE)
}
