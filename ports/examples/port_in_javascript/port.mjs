// SigLIP-2's image tower (NaFlex) in JavaScript, with no packages: it begins with the recorded pixels.
//
//     node port.mjs REFERENCE PORT [WEIGHTS]
//
// README.md beside this file says more. A matrix is {rows, columns, numbers}: numbers holds it row by
// row, in float64. Tokens are the rows (N), channels the columns (C). One picture is computed at a
// time, so there is no padding.

import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const EPS = 1e-6; // of every LayerNorm

function zeros(rows, columns) {
  return { rows, columns, numbers: new Float64Array(rows * columns) };
}

// The sum of two matrices of one shape.
function add(a, b) {
  const sum = zeros(a.rows, a.columns);
  for (let i = 0; i < sum.numbers.length; i++) {
    sum.numbers[i] = a.numbers[i] + b.numbers[i];
  }
  return sum;
}

// Tokens x (N, C) times a kernel (D, C), plus a bias of D numbers: (N, D).
function multiply(x, kernel, bias) {
  const result = zeros(x.rows, kernel.rows);
  for (let row = 0; row < x.rows; row++) {
    for (let column = 0; column < kernel.rows; column++) {
      let sum = bias.numbers[column];
      for (let i = 0; i < x.columns; i++) {
        sum += x.numbers[row * x.columns + i] * kernel.numbers[column * kernel.columns + i];
      }
      result.numbers[row * result.columns + column] = sum;
    }
  }
  return result;
}

function linear(x, weights, name) {
  return multiply(x, weights.get(`${name}.weight`), weights.get(`${name}.bias`));
}

// Gives each token mean 0 and variance 1, then scales and shifts each channel.
function layerNorm(x, weights, name) {
  const scale = weights.get(`${name}.weight`).numbers;
  const shift = weights.get(`${name}.bias`).numbers;
  const result = zeros(x.rows, x.columns);
  for (let row = 0; row < x.rows; row++) {
    const start = row * x.columns;
    let mean = 0;
    for (let i = 0; i < x.columns; i++) {
      mean += x.numbers[start + i] / x.columns;
    }
    let variance = 0;
    for (let i = 0; i < x.columns; i++) {
      variance += (x.numbers[start + i] - mean) ** 2 / x.columns;
    }
    const deviation = Math.sqrt(variance + EPS);
    for (let i = 0; i < x.columns; i++) {
      result.numbers[start + i] = ((x.numbers[start + i] - mean) / deviation) * scale[i] + shift[i];
    }
  }
  return result;
}

// GELU in its approximation by tanh, not the exact one.
function gelu(x) {
  return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
}

// Two layers with GELU between them.
function mlp(x, weights, name) {
  const hidden = linear(x, weights, `${name}.fc1`);
  hidden.numbers = hidden.numbers.map(gelu);
  return linear(hidden, weights, `${name}.fc2`);
}

// Scores of one query become shares that sum to 1. The largest score is taken off first, so that
// nothing overflows.
function softmax(scores) {
  const largest = Math.max(...scores);
  const shares = scores.map((score) => Math.exp(score - largest));
  let sum = 0;
  for (const share of shares) {
    sum += share;
  }
  return shares.map((share) => share / sum);
}

// Queries (M, C) look at keys and values (N, C); each head sees its own C / heads channels.
function attention(query, key, value, heads) {
  const headSize = query.columns / heads;
  const scale = 1 / Math.sqrt(headSize);
  const result = zeros(query.rows, query.columns);
  for (let head = 0; head < heads; head++) {
    const first = head * headSize; // the head's first channel
    for (let row = 0; row < query.rows; row++) {
      const scores = new Float64Array(key.rows);
      for (let token = 0; token < key.rows; token++) {
        for (let i = first; i < first + headSize; i++) {
          scores[token] +=
            scale * query.numbers[row * query.columns + i] * key.numbers[token * key.columns + i];
        }
      }
      const shares = softmax(scores);
      for (let token = 0; token < key.rows; token++) {
        for (let i = first; i < first + headSize; i++) {
          result.numbers[row * result.columns + i] +=
            shares[token] * value.numbers[token * value.columns + i];
        }
      }
    }
  }
  return result;
}

// A transformer block: each half reads normed tokens and adds to the tokens.
function block(x, weights, name, heads) {
  let normed = layerNorm(x, weights, `${name}.layer_norm1`);
  const query = linear(normed, weights, `${name}.self_attn.q_proj`);
  const key = linear(normed, weights, `${name}.self_attn.k_proj`);
  const value = linear(normed, weights, `${name}.self_attn.v_proj`);
  const mixed = attention(query, key, value, heads);
  x = add(x, linear(mixed, weights, `${name}.self_attn.out_proj`));

  normed = layerNorm(x, weights, `${name}.layer_norm2`);
  return add(x, mlp(normed, weights, `${name}.mlp`));
}

// One third of a kernel's or a bias's rows: 0 for the query, 1 for the key, 2 for the value.
function third(matrix, part) {
  const size = matrix.numbers.length / 3;
  const numbers = matrix.numbers.subarray(part * size, (part + 1) * size);
  return { rows: matrix.rows / 3, columns: matrix.columns, numbers };
}

// The attention pooling head: one learned query, the probe, looks at all tokens (N, C).
function pool(x, weights, heads) {
  // The kernels of query, key and value lie one below the other, and so do their biases.
  const kernel = weights.get("head.attention.in_proj_weight"); // (3 C, C)
  const bias = weights.get("head.attention.in_proj_bias"); // (3 C, 1)
  const probe = weights.get("head.probe"); // (1, C)
  const query = multiply(probe, third(kernel, 0), third(bias, 0));
  const key = multiply(x, third(kernel, 1), third(bias, 1));
  const value = multiply(x, third(kernel, 2), third(bias, 2));
  const mixed = attention(query, key, value, heads); // (1, C)
  const pooled = linear(mixed, weights, "head.attention.out_proj");

  // The probe itself is not added. The head's MLP has a LayerNorm and adds to its input.
  const normed = layerNorm(pooled, weights, "head.layernorm");
  return add(pooled, mlp(normed, weights, "head.mlp"));
}

// What each of n0 table cells weighs in each of n grid cells, along one axis: (n, n0).
function resizeMatrix(length, tableLength) {
  const scale = tableLength / length;
  const reach = Math.max(scale, 1); // antialiasing: where the table is made smaller, it is wider
  const matrix = zeros(length, tableLength);
  for (let row = 0; row < length; row++) {
    const centre = scale * (row + 0.5); // where the grid cell lies in the table
    // A triangle around the centre. Taps outside the table are dropped, and those that remain sum
    // to 1.
    const weights = matrix.numbers.subarray(row * tableLength, (row + 1) * tableLength);
    let sum = 0;
    for (let cell = 0; cell < tableLength; cell++) {
      weights[cell] = Math.max(0, 1 - Math.abs(cell + 0.5 - centre) / reach);
      sum += weights[cell];
    }
    for (let cell = 0; cell < tableLength; cell++) {
      weights[cell] /= sum;
    }
  }
  return matrix;
}

// The table (H0 * W0, C) resized to a grid, (h * w, C): A_h . P . A_w^T for each channel.
function positionEmbeddings(table, [tableHeight, tableWidth], [h, w]) {
  const channels = table.columns;
  const down = resizeMatrix(h, tableHeight).numbers; // A_h (h, H0)
  const across = resizeMatrix(w, tableWidth).numbers; // A_w (w, W0)

  // First along y: each row of the grid is a weighted sum of rows of the table.
  const rows = zeros(h * tableWidth, channels);
  for (let y = 0; y < h; y++) {
    for (let y0 = 0; y0 < tableHeight; y0++) {
      const weight = down[y * tableHeight + y0];
      for (let i = 0; i < tableWidth * channels; i++) {
        rows.numbers[y * tableWidth * channels + i] +=
          weight * table.numbers[y0 * tableWidth * channels + i];
      }
    }
  }

  // Then along x: each cell of the grid is a weighted sum of cells of its row.
  const cells = zeros(h * w, channels);
  for (let y = 0; y < h; y++) {
    for (let x = 0; x < w; x++) {
      for (let x0 = 0; x0 < tableWidth; x0++) {
        const weight = across[x * tableWidth + x0];
        for (let i = 0; i < channels; i++) {
          cells.numbers[(y * w + x) * channels + i] +=
            weight * rows.numbers[(y * tableWidth + x0) * channels + i];
        }
      }
    }
  }
  return cells;
}

// Each stage after the pixels (h * w, p * p * 3), in order: pairs of name and matrix.
function tower(pixels, grid, about, weights) {
  const stages = [];
  let x = linear(pixels, weights, "embeddings.patch_embedding"); // (h * w, C)
  stages.push(["patch_embedding", x]);

  const table = weights.get("embeddings.position_embedding.weight"); // (H0 * W0, C)
  x = add(x, positionEmbeddings(table, about.table_size, grid));
  stages.push(["position_embedding", x]);

  for (let number = 0; weights.has(`encoder.layers.${number}.layer_norm1.weight`); number++) {
    x = block(x, weights, `encoder.layers.${number}`, about.heads);
    stages.push([`block_${number}`, x]);
  }

  x = layerNorm(x, weights, "post_layernorm");
  stages.push(["norm", x]);
  stages.push(["pooled", pool(x, weights, about.heads)]);
  return stages;
}

// How the numbers of each dtype are read. Like the file, these machines have the low byte first.
const READERS = {
  F64: (bytes) => new Float64Array(bytes),
  F32: (bytes) => new Float32Array(bytes),
  BF16: (bytes) => {
    const upperHalves = Uint32Array.from(new Uint16Array(bytes), (half) => half << 16);
    return new Float32Array(upperHalves.buffer);
  },
  I32: (bytes) => new Int32Array(bytes),
  I64: (bytes) => Array.from(new BigInt64Array(bytes), Number),
};

// Every array of a file, by name. The first axis is the rows; one with no other has one column.
function readSafetensors(file) {
  const content = readFileSync(file);
  const start = 8 + Number(content.readBigUInt64LE(0));
  const header = JSON.parse(content.toString("utf8", 8, start));
  delete header.__metadata__;
  const arrays = new Map();
  for (const [name, { dtype, shape, data_offsets }] of Object.entries(header)) {
    const [begin, end] = data_offsets;
    if (!(dtype in READERS)) {
      throw new Error(`${file}: ${name} is ${dtype}; valid: ${Object.keys(READERS).join(", ")}`);
    }
    // The numbers need a buffer of their own: in the file they may lie at any byte.
    const bytes = new Uint8Array(content.subarray(start + begin, start + end)).buffer;
    const numbers = Float64Array.from(READERS[dtype](bytes));
    const [rows] = shape;
    arrays.set(name, { rows, columns: numbers.length / rows, numbers });
  }
  return arrays;
}

// Writes arrays as float32: {shape, numbers} by name.
function writeSafetensors(file, arrays) {
  const header = {};
  const parts = [];
  let offset = 0;
  for (const [name, { shape, numbers }] of arrays) {
    const part = Buffer.from(Float32Array.from(numbers).buffer);
    header[name] = { dtype: "F32", shape, data_offsets: [offset, offset + part.length] };
    parts.push(part);
    offset += part.length;
  }
  let text = JSON.stringify(header);
  text = text.padEnd(Math.ceil(text.length / 8) * 8); // the numbers begin at a multiple of 8 bytes
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  writeFileSync(file, Buffer.concat([length, Buffer.from(text), ...parts]));
}

function main([reference, port, weightsFile]) {
  if (port === undefined) {
    console.error("usage: node port.mjs REFERENCE PORT [WEIGHTS]");
    process.exit(2);
  }
  const about = JSON.parse(readFileSync(join(reference, "recording.json"), "utf8"));
  const recorded = readSafetensors(join(reference, "stages.safetensors"));
  weightsFile ??= join(reference, "weights", "transformers.safetensors");
  // A whole model holds a text tower too, and names the image tower before each name.
  const weights = new Map();
  for (const [name, matrix] of readSafetensors(weightsFile)) {
    weights.set(name.replace(/^vision_model\./, ""), matrix);
  }

  const written = new Map();
  for (let number = 0; number < about.pictures.length; number++) {
    const picture = String(number).padStart(3, "0");
    const grid = recorded.get(`${picture}.grid`).numbers; // h, w
    const pixels = recorded.get(`${picture}.pixels`);
    for (const [stage, { rows, columns, numbers }] of tower(pixels, grid, about, weights)) {
      const shape = stage === "pooled" ? [columns] : [rows, columns];
      written.set(`${picture}.${stage}`, { shape, numbers });
    }
  }
  mkdirSync(port, { recursive: true });
  const file = join(port, "stages.safetensors");
  writeSafetensors(file, written);
  console.log(`written: ${file} (${about.pictures.length} pictures)`);
}

main(process.argv.slice(2));
