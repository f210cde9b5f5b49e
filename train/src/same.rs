//! Checks that all ranks have the same value, such as an option or the length of a data set.

use std::fmt::{Debug, Write};

use sha2::{Digest as _, Sha256};

use super::comparison::{Digest, LONGEST_LABEL, cut, difference, gather, hexadecimal};
use collectives::{Communicator, Error, Result};

const CALL: &str = "check_same";
/// Values whose debug form has at most this many bytes are printed in errors.
const SHORT: usize = 120;

/// Checks that all ranks pass the same value and the same label, for example `("learning rate", &0.1)`. Collective.
///
/// Compares the values' [`Debug`] forms, so a value can be a number, a string, or a struct of options that derives
/// `Debug`. The debug form must contain everything that must be the same, and nothing that depends on the process. For
/// example, do not pass a `HashMap`, whose order is random, or an address.
///
/// ```
/// use collectives::Communicator;
/// use collectives_train::check_same;
///
/// let errors = Communicator::run_local(3, |comm| {
///     check_same(comm, "options", &("sgd", 0.1))?;
///     let samples = if comm.rank() == 2 { 99 } else { 100 };
///     Ok(check_same(comm, "samples", &samples).unwrap_err().to_string()) // an error on every rank
/// })?;
/// assert!(errors[0].starts_with("rank 0 called check_same(\"samples\") with 100, but rank 2 called check_same(\"samples\") with 99;"));
/// # Ok::<(), collectives::Error>(())
/// ```
///
/// Cost: one all-gather of 32 B per rank. If the values differ, one more all-gather of 256 B per rank. Needs little
/// memory, even if the debug form is long.
///
/// # Errors
///
/// - `Mismatch` on every rank if values or labels differ. The error names the label and the ranks that differ from most
///   ranks. If the values are short, the error contains two values that differ. The communicator stays usable.
/// - `InvalidArgument` if the value's implementation of `Debug` fails. The other ranks get a `Mismatch`.
/// - The errors of [`Communicator::all_gather_into`].
pub fn check_same<V: Debug + ?Sized>(comm: &Communicator, label: &str, value: &V) -> Result<()> {
    let mut printed = Printed::of(label);
    let result = write!(printed, "{value:?}").map_err(|_| {
        Error::argument(CALL, format!("{label:?}: the value cannot be printed, because its implementation of Debug returned an error"))
    });
    let mine = match &result {
        Ok(()) => printed.in_words(),
        Err(_) => "a value that cannot be printed".to_owned(),
    };
    let all = gather(comm, printed.digest(result.is_ok()))?;
    let same = match all.iter().all(|digest| *digest == all[0]) {
        true => Ok(()),
        false => {
            let label = cut(label, LONGEST_LABEL);
            Err(difference(comm, &all, &format!("{CALL}({label:?}) with {mine}"), "give all ranks the same label and value"))
        }
    };
    // This rank's own error is more useful than the difference.
    result.and(same)
}

/// A value's debug form: its digest, its length, and its beginning.
struct Printed {
    digest: Sha256,
    beginning: String,
    len: u64,
}

impl Printed {
    /// Starts with a label.
    fn of(label: &str) -> Self {
        let digest = Sha256::new().chain_update(CALL).chain_update((label.len() as u64).to_le_bytes()).chain_update(label);
        Self { digest, beginning: String::new(), len: 0 }
    }

    /// Describes the value: a short value is printed.
    fn in_words(&self) -> String {
        match self.len <= SHORT as u64 {
            true => self.beginning.clone(),
            false => {
                let digest = hexadecimal(&self.digest.clone().finalize()[..8]);
                format!("a value of {} B (SHA-256 of label and value: {digest}…)", self.len)
            }
        }
    }

    fn digest(self, is_printed: bool) -> Digest {
        self.digest.chain_update([u8::from(is_printed)]).finalize().into()
    }
}

impl Write for Printed {
    fn write_str(&mut self, part: &str) -> std::fmt::Result {
        self.digest.update(part);
        self.len += part.len() as u64;
        let room = SHORT.saturating_sub(self.beginning.len());
        self.beginning.push_str(cut(part, room));
        Ok(())
    }
}
