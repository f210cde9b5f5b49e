//! The linear algebra for low-rank compression. Pure; the same numbers give the same bits on every machine.

/// The number of partial sums of a dot product, so that the processor can add them in parallel.
const LANES: usize = 16;

/// Returns the sum of the products, in a fixed order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0_f32; LANES];
    for (a, b) in a.chunks(LANES).zip(b.chunks(LANES)) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum()
}

/// Adds `factor` times `x` to `y`.
fn add_scaled(y: &mut [f32], factor: f32, x: &[f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += factor * x);
}

/// Computes `into = matrix · right`: the matrix by rows, the others by columns.
pub(super) fn times(matrix: &[f32], columns: usize, right: &[f32], into: &mut [f32]) {
    let rows = matrix.len() / columns;
    for (right, into) in right.chunks_exact(columns).zip(into.chunks_exact_mut(rows)) {
        into.iter_mut().zip(matrix.chunks_exact(columns)).for_each(|(x, row)| *x = dot(row, right));
    }
}

/// Computes `into = matrixᵀ · left`.
pub(super) fn transposed_times(matrix: &[f32], columns: usize, left: &[f32], into: &mut [f32]) {
    let rows = matrix.len() / columns;
    for (left, into) in left.chunks_exact(rows).zip(into.chunks_exact_mut(columns)) {
        into.fill(0.0);
        left.iter().zip(matrix.chunks_exact(columns)).for_each(|(x, row)| add_scaled(into, *x, row));
    }
}

/// Adds `sign` times `left · rightᵀ` to the matrix.
pub(super) fn add_product(matrix: &mut [f32], columns: usize, left: &[f32], right: &[f32], sign: f32) {
    let rows = matrix.len() / columns;
    for (left, right) in left.chunks_exact(rows).zip(right.chunks_exact(columns)) {
        left.iter().zip(matrix.chunks_exact_mut(columns)).for_each(|(x, row)| add_scaled(row, sign * x, right));
    }
}

/// Returns whether no element is infinite or NaN.
pub(super) fn all_finite(elements: &[f32]) -> bool {
    elements.iter().all(|x| x.is_finite())
}

/// Makes the columns (of `rows` elements each) orthonormal, in `f64`. A column that depends linearly on the columns
/// before it, or is not finite, becomes zeros.
pub(super) fn orthonormalise(columns: &mut [f32], rows: usize) {
    let mut done: Vec<Vec<f64>> = Vec::new();
    for column in columns.chunks_exact_mut(rows) {
        let mut x: Vec<f64> = column.iter().copied().map(f64::from).collect();
        let before = norm(&x);
        // Twice is enough (Kahan, Parlett).
        for _ in 0..2 {
            for other in &done {
                let along: f64 = other.iter().zip(&x).map(|(a, b)| a * b).sum();
                x.iter_mut().zip(other).for_each(|(x, other)| *x -= along * other);
            }
        }
        let left = norm(&x);
        if left > before * f64::from(f32::EPSILON) {
            let scale = 1.0 / left;
            x.iter_mut().for_each(|x| *x *= scale);
        } else {
            x.fill(0.0);
        }
        column.iter_mut().zip(&x).for_each(|(column, x)| *column = *x as f32);
        done.push(x);
    }
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_those_of_the_definition() {
        // [1 2 3; 4 5 6] · [1 0; 0 1; 1 1], by columns.
        let matrix = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let mut product = [0.0; 4];
        times(&matrix, 3, &[1.0, 0.0, 1.0, 0.0, 1.0, 1.0], &mut product);
        assert_eq!(product, [4.0, 10.0, 5.0, 11.0]);
        let mut transposed = [9.0; 3];
        transposed_times(&matrix, 3, &[1.0, 2.0], &mut transposed);
        assert_eq!(transposed, [9.0, 12.0, 15.0]);
        let mut sum = matrix;
        add_product(&mut sum, 3, &[1.0, 2.0], &[1.0, 0.0, 1.0], -1.0);
        assert_eq!(sum, [0.0, 2.0, 2.0, 2.0, 5.0, 4.0]);
    }

    #[test]
    fn columns_become_orthonormal_and_dependent_ones_zeros() {
        let mut columns = [3.0, 4.0, 0.0, 6.0, 8.0, 0.0, 1.0, 0.0, 2.0];
        orthonormalise(&mut columns, 3);
        assert_eq!(columns[..6], [0.6, 0.8, 0.0, 0.0, 0.0, 0.0]);
        assert!(dot(&columns[..3], &columns[6..]).abs() < 1e-7);
        assert!((dot(&columns[6..], &columns[6..]) - 1.0).abs() < 1e-6);
    }

    #[test]
    fn columns_that_are_not_finite_become_zeros_and_leave_the_others_whole() {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut columns = [odd, 1.0, 3.0, 4.0];
            assert!(!all_finite(&columns));
            orthonormalise(&mut columns, 2);
            assert_eq!(columns, [0.0, 0.0, 0.6, 0.8]);
        }
    }
}
