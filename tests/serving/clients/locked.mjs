// SPDX-License-Identifier: Apache-2.0
// OpenAI's own client for JavaScript before a server with keys: node locked.mjs URL KEY.

import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "wrong", maxRetries: 0 });
await assert.rejects(client.models.list(), (error) => {
  assert.ok(error instanceof OpenAI.AuthenticationError);
  assert.equal(error.code, "invalid_api_key");
  return true;
});
const models = await client.withOptions({ apiKey: key }).models.list();
console.log(JSON.stringify({ models: models.data.map((each) => each.id) }));
