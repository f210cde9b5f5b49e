//! Properties that hold for any declarations of other ranks: they are refused, or each wanted element is sent once.

use super::plan::{Declaration, Plan};
use crate::checkpoint::piece::{Piece, runs_in};
use crate::checkpoint::plan::Declared;
use collectives::DType;

/// The most wanted elements that are visited.
const VISITED: usize = 1 << 12;

/// Parses each line as the declaration of a rank. If the declarations are accepted, checks that each wanted element is
/// sent once, by a rank that offers it.
pub fn state_declarations(data: &[u8]) {
    let parsed = data.split(|byte| *byte == b'\n').map(serde_json::from_slice::<Declaration>).collect::<Result<Vec<_>, _>>();
    let Ok(Ok(mut plan)) = parsed.map(|all| Plan::new(&all)) else { return };
    let wanted: usize = plan.wants.iter().fold(0, |sum, want| sum.saturating_add(want.extent.len()));
    if wanted > VISITED {
        return;
    }
    plan.limits = (1, 64);
    let mut filled: Vec<Vec<bool>> = plan.wants.iter().map(|want| vec![false; want.extent.len()]).collect();
    for step in plan.steps() {
        let want = &plan.wants[step.want];
        let tensor = &plan.tensors[want.tensor];
        assert!(tensor.holders[step.source].contains(&step.from));
        let runs = runs_in(&want.extent, step.window.clone(), &tensor.sources, usize::MAX).filter(|run| run.source == step.source);
        let mut len = 0;
        for run in runs {
            assert!(run.from + run.len <= tensor.sources[run.source].len());
            filled[step.want][run.to..run.to + run.len].iter_mut().for_each(|filled| assert!(!std::mem::replace(filled, true)));
            len += run.len;
        }
        assert_eq!(len, step.len);
    }
    assert!(filled.iter().flatten().all(|filled| *filled));
}

/// Returns an initial input: valid declarations of three ranks.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let columns = |range| Piece::Along { dimension: 1, range };
    let part = |name: &str, piece| Declared::new(name, DType::Bf16, &[6, 4], piece).ok();
    let lists = [
        (vec![part("weight", columns(0..3)), part("bias", Piece::Whole)], vec![part("weight", Piece::Flat(0..8))]),
        (vec![part("weight", columns(3..4)), part("bias", Piece::Whole)], vec![part("weight", Piece::Flat(8..24))]),
        (Vec::new(), vec![part("weight", columns(1..4)), part("bias", Piece::Whole)]),
    ];
    let declared = |parts: Vec<Option<Declared>>| parts.into_iter().flatten().collect();
    let all = lists.map(|(offered, wanted)| Declaration { offered: declared(offered), wanted: declared(wanted) });
    let lines: Vec<Vec<u8>> = all.iter().filter_map(|declaration| serde_json::to_vec(declaration).ok()).collect();
    vec![("state_declarations", lines.join(&b'\n'))]
}
