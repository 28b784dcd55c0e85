def test_model_folder_loads(model_dir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tok = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    text = tok.apply_chat_template(
        [{"role": "user", "content": "Question: Mira?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tok(text, add_special_tokens=False).input_ids
    assert tok.decode(ids) == text
    assert tok.eos_token_id != tok.pad_token_id
    assert len(tok) <= model.config.vocab_size
    print(len(tok), ids)
