"use strict";
// Predicts a row from the arrays in the page, as jboost.predict does, without a browser.

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const whole = await new Response(stream).arrayBuffer();
  const size = Number(new DataView(whole).getBigUint64(0, true));
  const types = { int32: Int32Array, uint32: Uint32Array, float32: Float32Array, uint8: Uint8Array };
  const arrays = {};
  for (const [name, type, count, offset] of JSON.parse(new TextDecoder().decode(new Uint8Array(whole, 8, size)))) {
    arrays[name] = new types[type](whole, 8 + size + offset, count);
  }
  return arrays;
}

/** The trees; a row holds numbers, the indices of categories, and NaN for missing. */
class Trees {
  constructor(arrays, facts, features) {
    Object.assign(this, arrays);
    this.facts = facts;
    this.features = features;
    this.link = facts.link ? new Function("s", facts.link.body) : (scores) => [...scores];
  }

  encode(row) {
    const { levels } = this.facts;
    return row.map((value, f) => {
      if (value == null) return NaN;
      const { category } = this.features[f];
      if (category == null) return Math.fround(value);
      const code = Number.isInteger(value) && value >= 0 && value < levels ? this.codes[category * levels + value] : 0;
      return code > 0 ? code : NaN;
    });
  }

  goesLeft(node, value) {
    if (Number.isNaN(value)) return this.missing_left[node] === 1;
    const set = this.set ? this.set[node] : -1;
    if (set < 0) return value <= this.threshold[node];
    const word = value >> 5;
    return word < this.facts.words && ((this.words[set * this.facts.words + word] >>> (value & 31)) & 1) === 1;
  }

  /** The nodes from the root of a tree to the leaf of an encoded row. */
  route(tree, row) {
    const first = this.start[tree], found = [first];
    let node = first;
    while (this.left[node] >= 0) {
      node = first + this.left[node] + (this.goesLeft(node, row[this.feature[node]]) ? 0 : 1);
      found.push(node);
    }
    return found;
  }

  terms(leaf, k, row) {
    const { terms, per_leaf } = this.facts;
    let sum = 0;
    for (let p = 0; p < terms; p++) {
      const f = this.term[leaf * terms + p];
      if (f < 0) continue;
      if (Number.isNaN(row[f])) return 0;
      const value = Math.min(Math.max(row[f], this.ranges[2 * f]), this.ranges[2 * f + 1]);
      const at = (leaf * per_leaf + k) * terms + p;
      sum += this.slope[at] * (value - this.center[at]);
    }
    return sum;
  }

  scores(row, offset) {
    const { num_scores, per_leaf, terms } = this.facts;
    const encoded = this.encode(row), sums = new Float64Array(num_scores);
    const every = num_scores / per_leaf;
    for (let tree = 0; tree + 1 < this.start.length; tree++) {
      const leaf = this.route(tree, encoded).at(-1);
      for (let k = 0; k < per_leaf; k++) {
        sums[(tree % every) + k] += this.value[leaf * per_leaf + k] + (terms ? this.terms(leaf, k, encoded) : 0);
      }
    }
    return sums.map((sum, k) => sum + this.init[k] + (offset ? offset[k] : 0));
  }

  predict(row, offset) {
    return this.link(this.scores(row, offset));
  }
}
